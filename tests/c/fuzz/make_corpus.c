/* make_corpus.c: writes the seeds of the corpus: small frames of each codec and kind, and inputs of
 * each kind for the round trip. The same files on every run. What a fuzzer broke is added
 * to the corpus by hand, under a name that says what it is.
 *
 *   make_corpus FOLDER
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agentcomm.h"
#include "core/wire.h"
#include "harness.h"

static const char *folder;
static float scratch[AGC_SCRATCH_NELEMS];

static void write_file(const char *target, const char *name, const uint8_t *bytes, size_t nbytes)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/%s/%s", folder, target, name);
    FILE *file = fopen(path, "wb");
    CHECK(file != NULL);
    CHECK_EQ(fwrite(bytes, 1, nbytes, file), nbytes);
    CHECK_EQ(fclose(file), 0);
}

/* Frames of a codec and, if it is sparse, of a codec of its values. */
static void write_frames_of(const struct agc_codec_info *codec, const struct agc_codec_info *values)
{
    static const uint32_t dtypes[] = {AGC_DTYPE_F32, AGC_DTYPE_F16, AGC_DTYPE_BF16, AGC_DTYPE_F64};
    const struct agc_codec_info *numbers = values ? values : codec;
    for (int d = 0; d < 4; d++) {
        for (int variant = d % 2; variant < (values ? 2 : 3); variant += 2) {
            struct agc_spec spec = {.codec = codec->id, .values = values ? values->id : 0};
            uint64_t nelems = variant == 0 ? 40 : variant == 1 ? 300 : 0, nbytes;
            double x[300];
            uint8_t frame[10 * 300 + 128];
            char name[100];
            if (codec->flags & AGC_CODEC_SPARSE)
                spec.frac_e9 = variant == 0 ? 1000000000 : 100000000;
            if (numbers->flags & AGC_CODEC_BLOCKS && variant == 0)
                spec.block_nelems = 32;
            if (numbers->flags & AGC_CODEC_STOCHASTIC && variant == 1)
                spec.rounding = AGC_ROUNDING_STOCHASTIC;
            random_fill((float *)x, 600, VALUES_GAUSS);
            CHECK_OK(agc_encode(&spec, x, dtypes[d], nelems, NULL, 7, variant == 1, scratch, frame,
                                sizeof frame, &nbytes));
            snprintf(name, sizeof name, "%s%s%s-dtype%u-%u", codec->name, values ? "+" : "",
                     values ? values->name : "", dtypes[d], (unsigned)nelems);
            write_file("fuzz_decode", name, frame, nbytes);
        }
    }
}

static void write_frames(void)
{
    struct agc_codec_info codec, values;
    for (uint32_t i = 0; agc_codec_info_at(i, &codec); i++) {
        write_frames_of(&codec, NULL);
        for (uint32_t j = 0; codec.flags & AGC_CODEC_SPARSE && agc_codec_info_at(j, &values); j++)
            if (values.flags & AGC_CODEC_VALUES)
                write_frames_of(&codec, &values);
    }
    write_file("fuzz_decode", "empty", (const uint8_t *)"", 0);
}

static void write_round_trips(void)
{
    struct agc_codec_info info;
    for (uint8_t codec = 0; agc_codec_info_at(codec, &info); codec++) {
        /* Dense codecs have no use for the upper bits: the fraction. */
        int nflags = info.flags & AGC_CODEC_SPARSE ? 256 : 16;
        int step = info.flags & AGC_CODEC_SPARSE ? 23 : 5;
        for (int flags = codec % 4; flags < nflags; flags += step) {
            for (int values = flags % 5; values < NVALUES; values += 9) {
                uint8_t kind = (uint8_t)(values / 3 | (flags >> 4) % 8 << 2);
                uint8_t input[8 + 4 * 70] = {
                    codec, (uint8_t)(flags ? 1 + values : 0), (uint8_t)flags, kind, 1, 2};
                float x[70];
                char name[100];
                random_fill(x, 70, (enum value_class)values);
                memcpy(input + 8, x, sizeof x);
                snprintf(name, sizeof name, "codec%u-flags%d-%s", codec, flags,
                         value_class_name((enum value_class)values));
                for (char *p = name; *p; p++)
                    *p = *p == ' ' ? '-' : *p;
                write_file("fuzz_round_trip", name, input, sizeof input);
            }
        }
    }
}

int main(int argc, char **argv)
{
    if (argc != 2)
        return 1;
    folder = argv[1];
    test_start(1, 60);
    test_run(&(struct test)TEST(write_frames));
    test_run(&(struct test)TEST(write_round_trips));
    return test_finish();
}
