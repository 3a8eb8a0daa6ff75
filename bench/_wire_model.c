/* A draft head whose rows say what a script says, each step in fixed time: grow.c's trees on it are grown as on a real
 * one. bench/_wire_model.py has the same structure. */
#define _GNU_SOURCE
#include "grow.h"

#include <stdlib.h>
#include <sys/prctl.h>
#include <time.h>

/* What the drafter expects after each position of a session's text: [positions][num_top]. */
typedef struct {
    const float *chances;
    const int64_t *tokens;
} Text;

struct Decoder {
    const Text *texts; /* by key */
    int64_t *keys;     /* by slot: of the session whose first row lies there */
    int64_t (*steps_ns)[2]; /* begin and end, of the first max_steps */
    int64_t num_steps, max_steps, step_ns;
    int32_t num_top, ahead; /* tokens that a text names; of them, which a row names, counted from its own position */
    int32_t burn, nap_ns, spun_ns; /* bench/_wire_clock.py */
    char *memory;
    int64_t memory_bytes;
};

static int64_t now_ns(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static void sleep_until(int64_t ns) {
    static __thread int is_exact;
    if (!is_exact) is_exact = !prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0); /* else 50 us late */
    const struct timespec end = {ns / 1000000000, ns % 1000000000};
    clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &end, NULL);
}

/* As bench/_wire_clock.py. */
static void spend(const Decoder *d, int64_t start_ns) {
    const clockid_t clock = d->burn ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC;
    const int64_t end_ns = (d->burn ? now_ns(clock) : start_ns) + d->step_ns;
    const int64_t slept_ns = end_ns - d->spun_ns;
    for (int64_t now = start_ns; !d->burn && now < slept_ns; now = now_ns(clock))
        sleep_until(now + d->nap_ns < slept_ns ? now + d->nap_ns : slept_ns);
    while (now_ns(clock) < end_ns) {}
}

static void say(const Decoder *d, const Layout *layout, int segment, int row, int at, const Likeliest *likeliest) {
    const int32_t first_slot = layout->slot_table[(int64_t)layout->table_rows[segment] * layout->table_width];
    const Text *text = &d->texts[d->keys[first_slot]];
    const int64_t from = (int64_t)(layout->positions[row] + d->ahead) * d->num_top, to = (int64_t)at * likeliest->num_top;
    for (int i = 0; i < likeliest->num_top; i++) {
        likeliest->probabilities[to + i] = text->chances[from + i];
        likeliest->ids[to + i] = (int32_t)text->tokens[from + i];
    }
}

char *outrider_decoder_memory(Decoder *d, int64_t bytes) {
    if (bytes > d->memory_bytes) {
        free(d->memory);
        d->memory = malloc(bytes);
        d->memory_bytes = d->memory ? bytes : 0;
    }
    return d->memory;
}

int outrider_decoder_forward(Decoder *d, const Layout *layout, const int32_t *tokens, const void *states,
                             const void *features, const int32_t *state_rows, int num_rows, const int32_t *logit_rows,
                             int num_logits, float *logits, void *carried, const Likeliest *likeliest,
                             double *seconds) {
    const int64_t start_ns = now_ns(CLOCK_MONOTONIC);
    for (int s = 0, at = 0; s < layout->num_segments; s++) {
        const int first = layout->first_rows[s], end = first + layout->num_rows[s];
        if (!layout->prefix_lens[s] && layout->mask_starts[s] < 0) d->keys[layout->slots[first]] = tokens[first];
        for (; at < num_logits && logit_rows[at] < end; at++) say(d, layout, s, logit_rows[at], at, likeliest);
    }
    spend(d, start_ns);
    if (d->num_steps < d->max_steps) {
        d->steps_ns[d->num_steps][0] = start_ns;
        d->steps_ns[d->num_steps++][1] = now_ns(CLOCK_MONOTONIC);
    }
    return 1;
}
