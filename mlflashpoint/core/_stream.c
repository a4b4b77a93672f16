/* Copies memory past the caches.

   An ordinary store reads the line that it overwrites and pushes out of the caches what training needs next. A checkpoint
   is written once and not read soon, so it is stored with streaming stores, which do neither. The C library does so
   only for single moves of a large part of the cache, far above a tensor's size.

   No Python in here: the library is loaded with ctypes, which releases the interpreter's lock while it runs. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define LINE 64
#define PAGE 4096
/* Four pages at a time: a memory bank that is busy with one page lets the others go on. */
#define STRIP (4 * PAGE)

#if defined(__x86_64__)
#include <immintrin.h>

#define STREAM(NAME, TARGET, COPY_LINE)                                                                               \
    TARGET static void NAME(char *to, const char *from, size_t bytes)                                                 \
    {                                                                                                                 \
        size_t head = (size_t)(-(uintptr_t)to) % LINE;                                                                \
        if (head > bytes)                                                                                             \
            head = bytes;                                                                                             \
        memcpy(to, from, head);                                                                                       \
        to += head, from += head, bytes -= head;                                                                      \
        for (; bytes >= STRIP; bytes -= STRIP, to += STRIP, from += STRIP)                                            \
            for (size_t line = 0; line < PAGE; line += LINE)                                                          \
                for (size_t place = line; place < STRIP; place += PAGE)                                               \
                    COPY_LINE(to + place, from + place);                                                              \
        for (; bytes >= LINE; bytes -= LINE, to += LINE, from += LINE)                                                \
            COPY_LINE(to, from);                                                                                      \
        memcpy(to, from, bytes);                                                                                      \
    }

__attribute__((target("avx2"))) static inline void line_avx2(char *to, const char *from)
{
    __m256i a = _mm256_loadu_si256((const void *)from), b = _mm256_loadu_si256((const void *)(from + 32));
    _mm256_stream_si256((void *)to, a);
    _mm256_stream_si256((void *)(to + 32), b);
}

static inline void line_sse2(char *to, const char *from)
{
    for (int part = 0; part < LINE; part += 16)
        _mm_stream_si128((void *)(to + part), _mm_loadu_si128((const void *)(from + part)));
}

STREAM(stream_avx2, __attribute__((target("avx2"))), line_avx2)
STREAM(stream_sse2, , line_sse2)

void mlflashpoint_copy(char *const *to, const char *const *from, const size_t *bytes, size_t count)
{
    int wide = __builtin_cpu_supports("avx2");
    for (size_t i = 0; i < count; i++)
        (wide ? stream_avx2 : stream_sse2)(to[i], from[i], bytes[i]);
    /* Streaming stores are not ordered with others: nothing may be announced before they are done. */
    _mm_sfence();
}

#else

void mlflashpoint_copy(char *const *to, const char *const *from, const size_t *bytes, size_t count)
{
    for (size_t i = 0; i < count; i++)
        memcpy(to[i], from[i], bytes[i]);
}

#endif
