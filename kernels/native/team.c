#define _GNU_SOURCE
#include "team.h"

#include "amx.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#define RELAX() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define RELAX() __asm__ volatile("yield")
#else
#define RELAX() ((void)0)
#endif

/* Looks at a counter before the core is offered to others, and before an idle helper goes to sleep (some 10 us). */
#define SPINS_BEFORE_YIELD 2000
#define SPINS_BEFORE_SLEEP 400

/* A phase's state in one word: the job's epoch (32 bits), tasks done (16) and tasks handed out (16). The epoch keeps a
 * late thread from taking a task of a newer job; a phase left over from an older one needs no clearing. Phases lie side
 * by side: they are used one after another, and after a step that streamed all weights each line is a miss. */
typedef _Atomic uint64_t Phase;

#define EPOCH(state) ((uint32_t)((state) >> 32))
#define DONE(state) ((int)((state) >> 16 & 0xffff))
#define HANDED_OUT(state) ((int)((state) & 0xffff))
#define ONE_DONE ((uint64_t)0x10000)
#define MAX_UNITS 0xfff0

struct Team {
    _Atomic uint32_t epoch;
    char apart[124];
    int num_helpers; /* settled before the first job */
    Phase *phases;
    pthread_t *helpers;
    pthread_mutex_t mutex;
    pthread_cond_t wake;
    /* Below: under the mutex. */
    int stopping;
    int sleepers;
    Job job;
    char context[MAX_CONTEXT_BYTES];
};

typedef struct {
    Team *team;
    int thread;
} Seat;

/* How many tasks to take of those left: many at first, so that the counter is asked seldom and a thread reads on in one
 * piece of memory, where what it asks for ahead is its own; single ones towards the end, so that all finish together. */
static int grab_size(const Team *team, int left) {
    int size = 3 * left / (4 * (team->num_helpers + 1));
    return size > 1 ? size : 1;
}

/* Whether the team is at a later job. To be asked where a phase's epoch is another than the worker's: by itself that
 * does not tell, since a phase that few jobs have may be older than epochs are apart. Who has seen a later job's epoch
 * in a phase sees it in the team too. */
static int is_over(const Worker *worker) {
    return atomic_load_explicit(&worker->team->epoch, memory_order_relaxed) != worker->epoch;
}

int run_phase(Worker *worker, Task task, const void *context, int num_tasks) {
    Phase *state = &worker->team->phases[worker->phase++];
    const uint64_t fresh = (uint64_t)worker->epoch << 32;
    /* Tasks are counted in units, of one task unless there are too many for the counter. */
    const int unit = num_tasks / MAX_UNITS + 1, num_units = (num_tasks + unit - 1) / unit;
    if (!num_tasks) return 1;
    uint64_t seen = atomic_load_explicit(state, memory_order_acquire);
    for (;;) {
        uint64_t base = seen;
        if (EPOCH(seen) != worker->epoch) {
            if (is_over(worker)) return 0;
            base = fresh;
        }
        const int first = HANDED_OUT(base);
        if (first >= num_units) break;
        const int size = grab_size(worker->team, num_units - first);
        if (!atomic_compare_exchange_weak_explicit(state, &seen, base + size, memory_order_acq_rel,
                                                   memory_order_acquire))
            continue;
        for (int i = first * unit; i < (first + size) * unit && i < num_tasks; i++) task(context, i, worker->thread);
        seen = atomic_fetch_add_explicit(state, size * ONE_DONE, memory_order_release) + size * ONE_DONE;
    }
    for (int spins = 0;; spins++) {
        seen = atomic_load_explicit(state, memory_order_acquire);
        if (EPOCH(seen) != worker->epoch) return 0;
        if (DONE(seen) >= num_units) return 1;
        RELAX();
        if (spins > SPINS_BEFORE_YIELD) sched_yield();
    }
}

/* Waits for a job newer than `last` and takes a copy of it; 0 when the team is being taken down. */
static int next_job(Team *team, uint32_t last, Worker *worker, Job *job, char *context) {
    for (int spins = 0; spins < SPINS_BEFORE_SLEEP; spins++) {
        if (atomic_load_explicit(&team->epoch, memory_order_relaxed) != last) break;
        RELAX();
    }
    pthread_mutex_lock(&team->mutex);
    team->sleepers++;
    while (!team->stopping && atomic_load_explicit(&team->epoch, memory_order_relaxed) == last)
        pthread_cond_wait(&team->wake, &team->mutex);
    team->sleepers--;
    worker->epoch = atomic_load_explicit(&team->epoch, memory_order_relaxed);
    worker->phase = 0;
    *job = team->job;
    memcpy(context, team->context, MAX_CONTEXT_BYTES);
    int going_on = !team->stopping;
    pthread_mutex_unlock(&team->mutex);
    return going_on;
}

/* By this name outrider/placement.py and `top -H` know it. */
static void name_thread(pthread_t thread, int number) {
#if defined(__linux__)
    char name[16];
    snprintf(name, sizeof name, "team-%d", number);
    pthread_setname_np(thread, name);
#else
    (void)thread, (void)number;
#endif
}

static void *help(void *argument) {
    Seat seat = *(Seat *)argument;
    free(argument);
    Worker worker = {seat.team, 0, seat.thread, 0};
    _Alignas(64) char context[MAX_CONTEXT_BYTES];
    Job job;
    while (next_job(seat.team, worker.epoch, &worker, &job, context)) {
        job(context, &worker);
        amx_end();
    }
    return NULL;
}

/* Returns the job's epoch. */
static uint32_t hand_out(Team *team, Job job, const void *context, int context_bytes) {
    uint32_t epoch = atomic_load_explicit(&team->epoch, memory_order_relaxed) + 1;
    pthread_mutex_lock(&team->mutex);
    team->job = job;
    memcpy(team->context, context, context_bytes);
    atomic_store_explicit(&team->epoch, epoch, memory_order_relaxed);
    if (team->sleepers) pthread_cond_broadcast(&team->wake);
    pthread_mutex_unlock(&team->mutex);
    return epoch;
}

void run_job(Team *team, Job job, const void *context, int context_bytes) {
    Worker worker = {team, hand_out(team, job, context, context_bytes), 0, 0};
    job(context, &worker);
    amx_end();
}

Team *outrider_team_create(int num_threads, int max_phases) {
    Team *team = calloc(1, sizeof *team);
    if (!team) return NULL;
    team->phases = calloc(max_phases, sizeof *team->phases);
    team->helpers = calloc(num_threads, sizeof *team->helpers);
    pthread_mutex_init(&team->mutex, NULL);
    pthread_cond_init(&team->wake, NULL);
    if (!team->phases || !team->helpers) {
        outrider_team_destroy(team);
        return NULL;
    }
    /* A helper that cannot be started is done without. */
    for (int i = 1; i < num_threads; i++) {
        Seat *seat = malloc(sizeof *seat);
        if (!seat) break;
        *seat = (Seat){team, i};
        if (pthread_create(&team->helpers[team->num_helpers], NULL, help, seat)) {
            free(seat);
            break;
        }
        name_thread(team->helpers[team->num_helpers++], i);
    }
    return team;
}

void outrider_team_destroy(Team *team) {
    pthread_mutex_lock(&team->mutex);
    team->stopping = 1;
    pthread_cond_broadcast(&team->wake);
    pthread_mutex_unlock(&team->mutex);
    for (int i = 0; i < team->num_helpers; i++) pthread_join(team->helpers[i], NULL);
    pthread_cond_destroy(&team->wake);
    pthread_mutex_destroy(&team->mutex);
    free(team->phases);
    free(team->helpers);
    free(team);
}
