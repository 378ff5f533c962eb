/* regression_driver.c: runs a fuzz target over files and folders, without libFuzzer: so any
 * compiler can replay the corpus.
 *
 *   replay_fuzz_decode FILE_OR_FOLDER...
 */
#define _POSIX_C_SOURCE 200809L
#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t nbytes);

static unsigned ninputs;

/* False: not a file that can be read. */
static int run_file(const char *path)
{
    FILE *file = fopen(path, "rb");
    if (!file)
        return 0;
    uint8_t *data = NULL;
    size_t nbytes = 0, got;
    do {
        uint8_t *grown = (uint8_t *)realloc(data, nbytes + 65536);
        if (!grown)
            break;
        data = grown;
        got = fread(data + nbytes, 1, 65536, file);
        nbytes += got;
    } while (got == 65536);
    int readable = data != NULL && !ferror(file);
    if (readable) {
        printf("%s\n", path); /* before it runs: the last line names the input that crashed */
        fflush(stdout);
        LLVMFuzzerTestOneInput(data, nbytes);
        ninputs++;
    }
    fclose(file);
    free(data);
    return readable;
}

static int run_folder(const char *path)
{
    char name[4096];
    struct dirent *entry;
    DIR *folder = opendir(path);
    if (!folder)
        return 0;
    int good = 1;
    while ((entry = readdir(folder))) {
        if (entry->d_name[0] == '.')
            continue;
        snprintf(name, sizeof name, "%s/%s", path, entry->d_name);
        good &= run_file(name);
    }
    closedir(folder);
    return good;
}

int main(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        if (!run_folder(argv[i]) && !run_file(argv[i])) {
            printf("%s: cannot be read\n", argv[i]);
            return 1;
        }
    }
    printf("%u inputs replayed\n", ninputs);
    return ninputs == 0;
}
