/* Products with quantised weights: the inner sums are whole numbers, so they are exact in any order and on any CPU.
 *
 * Rows are coded first, each with one scale: to 16 bits where only the weights are meant to be coarse (finer than
 * bf16), to 8 bits where the method is dynamic. */
#ifndef OUTRIDER_QUANTIZED_H
#define OUTRIDER_QUANTIZED_H

#include "linear.h"

/* Consecutive k of an INT4 matrix that share a step and a low; k is padded to whole groups, with zeros. */
#define GROUP 32

/* Layout of a packed quantised tile, k padded to whole groups (kernels/quantize.py packs):
 *   INT8:          32 scales (fp32), then [k / 2][32 outputs][2 consecutive k] int8
 *   INT8_DYNAMIC:  32 scales (fp32), 32 times -128 * the sum of the weights (int32), [k / 4][32][4] int8
 *   INT4:          a group after another: 32 steps, 32 lows (bf16), then [GROUP / 4][16 outputs][2 k] words of 16 bits;
 *                  a word's nibbles, lowest first: output o at k, o + 16 at k, o at k + 2, o + 16 at k + 2
 * A weight is scale * code, or low + step * nibble. */

/* Whether the CPU multiplies bytes, unsigned by signed. */
#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(__AVX512F__))
#define HAS_BYTE_DOT 1
#else
#define HAS_BYTE_DOT 0
#endif

/* Coded rows. data: [rows, width] int16; for INT8_DYNAMIC uint8 with 128 added where bytes are multiplied, else int16,
 * of each four k the two even ones first. value = scale * code. */
typedef struct {
    void *data;
    float *scales;  /* [rows] */
    int32_t *sums;  /* [rows, width / GROUP]: of the 16-bit codes, for INT4 */
    int32_t width;  /* a multiple of GROUP; codes past the row's own numbers are zeros */
} Codes;

static inline int padded(int k) { return (k + GROUP - 1) / GROUP * GROUP; }

/* Codes x [width] as row `row` of `codes`, as a matrix of that format wants it. A row that is not finite gets NaN for
 * a scale, and so NaN for results. */
void code_row(const float *x, int width, Format format, Codes codes, int row);

/* As linear_tile; a row's result is the same whatever rows go with it. */
void quantized_tile(const Matrix *w, Codes x, Rows y, int num_rows, Finish finish, int tile);

/* Whichever of the two `w` needs, of codes or of x. */
static inline void product_tile(const Matrix *w, Codes codes, Rows x, Rows y, int num_rows, Finish finish, int tile) {
    if (is_quantised(w))
        quantized_tile(w, codes, y, num_rows, finish, tile);
    else
        linear_tile(w, x, y, num_rows, finish, tile);
}

#endif
