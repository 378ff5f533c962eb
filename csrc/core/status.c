/* status.c: names and sentences of the status codes. */
#include "agentcomm.h"

const char *agc_status_name(enum agc_status s)
{
    switch (s) {
#define AGC_STATUS(name, value, fatal, exception, text)                                            \
    case AGC_##name:                                                                               \
        return "AGC_" #name;
#include "agc_status.inc"
#undef AGC_STATUS
    }
    return "AGC_ERR_UNKNOWN";
}

const char *agc_status_text(enum agc_status s)
{
    switch (s) {
#define AGC_STATUS(name, value, fatal, exception, text)                                            \
    case AGC_##name:                                                                               \
        return text;
#include "agc_status.inc"
#undef AGC_STATUS
    }
    return "unknown status";
}

const char *agc_status_exception(enum agc_status s)
{
    switch (s) {
#define AGC_STATUS(name, value, fatal, exception, text)                                            \
    case AGC_##name:                                                                               \
        return #exception;
#include "agc_status.inc"
#undef AGC_STATUS
    }
    return "AgentCommError";
}

bool agc_status_is_fatal(enum agc_status s)
{
    switch (s) {
#define AGC_STATUS(name, value, fatal, exception, text)                                            \
    case AGC_##name:                                                                               \
        return fatal;
#include "agc_status.inc"
#undef AGC_STATUS
    }
    return true;
}
