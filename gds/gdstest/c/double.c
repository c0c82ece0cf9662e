// A double of libcuda and libcufile over host memory, for tests without a GPU. "Device" memory is anonymous shared memory,
// so that handles work between processes as the real ones do. The kernels are done here in C. It injects faults by
// rules, from the environment (KVHOST_DOUBLE) when it is initialised, or at any time by kvdouble_rules:
//
//   rule[,rule...]    rule = function[:nth=N][:from=N][:every=N][:code=C][:errno=E][:delay=MS][:short=BYTES][:flip=BYTE][:hang][:answer=N]
//
// nth: only the N-th call; from: the N-th call and all later ones; every: each N-th; without any every call. code is what the function
// answers (for cuFile's reads and writes -code is; with errno, -1 and that errno). short moves fewer bytes, flip damages one
// of those that were read, that cuMemcpyAsync copied, or that the kernels pack and join wrote of their first extent. hang waits until the rules change. kvdouble_calls counts a function's calls. No figure is to be
// had from this.
//
// answer is the GPU that cuPointerGetAttribute names, and how many cuDeviceGetCount counts.
//
// It is one translation unit: the parts below, in this order.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
enum { INVALID_VALUE = 1, NO_MEMORY = 2, NOT_INITIALIZED = 3, INVALID_CONTEXT = 201, INVALID_HANDLE = 400, REGISTERED = 712, UNREGISTERED = 713 };

#include "xxh3.h"    // of the checksum kernel
#undef KV_TABLE      // another one in the next
#include "huffman.h" // of the codec's kernels

#include "faults.h"
#include "memory.h"
#include "codec.h"
#include "cuda.h"
#include "sharing.h"
#include "cufile.h"
