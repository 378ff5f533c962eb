/* cpu.h: detection of CPU features, one function per architecture. */
#ifndef AGC_CPU_H
#define AGC_CPU_H

#include <stdint.h>

uint32_t agc_cpu_detect_x86(void); /* csrc/x86/cpu_x86.c */

#endif /* AGC_CPU_H */
