// Prints the layout of the cuFile structures that gds passes to the library, one "name value" a line, as the installed
// header has them. Build and run on a machine with the CUDA toolkit:
//   cc -I/usr/local/cuda/include -o cufile_layout cufile_layout.c && ./cufile_layout
// testdata/layout.txt holds what it printed; a test compares the Go side with that.
#include <stddef.h>
#include <stdio.h>

#include <cufile.h>

#define SIZE(type) printf("%s.size %zu\n", #type, sizeof(type))
#define AT(type, field) printf("%s.%s %zu\n", #type, #field, offsetof(type, field))
#define VALUE(name) printf("%s %d\n", #name, (int)(name))

int main(void) {
  SIZE(CUfileError_t);
  AT(CUfileError_t, err);
  AT(CUfileError_t, cu_err);
  SIZE(CUfileDescr_t);
  AT(CUfileDescr_t, type);
  AT(CUfileDescr_t, handle);
  AT(CUfileDescr_t, fs_ops);
  SIZE(CUfileDrvProps_t);
  AT(CUfileDrvProps_t, nvfs.major_version);
  AT(CUfileDrvProps_t, nvfs.minor_version);
  AT(CUfileDrvProps_t, nvfs.poll_thresh_size);
  AT(CUfileDrvProps_t, nvfs.max_direct_io_size);
  AT(CUfileDrvProps_t, nvfs.dstatusflags);
  AT(CUfileDrvProps_t, nvfs.dcontrolflags);
  AT(CUfileDrvProps_t, fflags);
  AT(CUfileDrvProps_t, max_device_cache_size);
  AT(CUfileDrvProps_t, per_buffer_cache_size);
  AT(CUfileDrvProps_t, max_device_pinned_mem_size);
  AT(CUfileDrvProps_t, max_batch_io_size);
  AT(CUfileDrvProps_t, max_batch_io_timeout_msecs);
  VALUE(CU_FILE_HANDLE_TYPE_OPAQUE_FD);
  VALUE(CU_FILE_SUCCESS);
  VALUE(CU_FILE_DRIVER_NOT_INITIALIZED);
  VALUE(CU_FILE_CUDA_DRIVER_ERROR);
  VALUE(CUFILE_PARAM_PROPERTIES_ALLOW_COMPAT_MODE);
  VALUE(CUFILE_PARAM_LOG_DIR);
  VALUE(CUFILE_PARAM_PROFILE_STATS);
  SIZE(CUfileStatsLevel1_t);
  SIZE(CUfileStatsLevel2_t);
  SIZE(CUfileStatsLevel3_t);
  SIZE(CUfilePerGpuStats_t);
  SIZE(CUfileOpCounter_t);
  return 0;
}
