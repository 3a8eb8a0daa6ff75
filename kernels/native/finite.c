/* Numbers that another process wrote: copied, and checked on the way. */
#include <stdint.h>

#define COPY(word) \
    do { \
        const word *from = source; \
        word *to = target, highest = 0; \
        for (int64_t i = 0; i < count; i++) { \
            const word bits = from[i], exponent = bits & (word)infinity; \
            to[i] = bits; \
            highest = exponent > highest ? exponent : highest; \
        } \
        return highest != (word)infinity; \
    } while (0)

/* Copies `count` floating-point numbers of 2 or 4 bytes; whether all are finite. infinity: its bits, all of which NaN has
 * set too. */
int outrider_copy_finite(void *target, const void *source, int64_t count, int bytes, uint32_t infinity) {
    if (bytes == 2) COPY(uint16_t);
    COPY(uint32_t);
}
