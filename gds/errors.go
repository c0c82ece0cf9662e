package gds

import (
	"errors"
	"fmt"
)

// Errors of loading the libraries.
var (
	// ErrNoDriver says that libcuda cannot be loaded: no NVIDIA driver is installed.
	ErrNoDriver = errors.New("gds: no CUDA driver")
	// ErrNoCuFile says that libcufile cannot be loaded.
	ErrNoCuFile = errors.New("gds: no cuFile library")
	// ErrSymbol says that a library is too old and lacks a function.
	ErrSymbol = errors.New("gds: library lacks a function")
	// ErrNoGPU says that no GPU has the wanted UUID.
	ErrNoGPU = errors.New("gds: no such GPU")
)

// Errors of using a GPU.
var (
	// ErrLost says that the GPU's context is lost for good after a sticky error.
	ErrLost = errors.New("gds: GPU is out of service")
	// ErrClosed says that the GPU is closed.
	ErrClosed = errors.New("gds: GPU is closed")
	// ErrImport refuses a memory handle.
	ErrImport = errors.New("gds: memory cannot be imported")
	// ErrStopped says that a batch was stopped by its flag.
	ErrStopped = errors.New("gds: batch was stopped")
	// ErrUnpinned says that memory is not registered with the driver.
	ErrUnpinned = errors.New("gds: memory is not registered")
	// ErrShort says that cuFile moved fewer bytes than requested.
	ErrShort = errors.New("gds: short transfer")
	// ErrHung says that cuFile did not return in time.
	ErrHung = errors.New("gds: cuFile does not answer")
	// ErrNoSlot says that the device memory for slots is in use, or too small for the file.
	ErrNoSlot = errors.New("gds: no free slot")
	// ErrSum says that bytes in device memory have a wrong checksum.
	ErrSum = errors.New("gds: another checksum")
	// ErrCodec says that no encoder writes such stored bytes or such a row for them.
	ErrCodec = errors.New("gds: no stored extent")
	// ErrConfig refuses a configuration.
	ErrConfig = errors.New("gds: bad configuration")
)

// Result is a result code of the CUDA driver; 0 is success.
type Result int32

// Sticky reports whether the context is unusable after this result: every later call in it fails.
func (r Result) Sticky() bool {
	switch r {
	case 4, 46, 214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721:
		return true
	}
	return false
}

func (r Result) String() string {
	if name, ok := resultNames[r]; ok {
		return name
	}
	return fmt.Sprintf("CUDA error %d", int32(r))
}

// Error is a failed call of the CUDA driver.
type Error struct {
	Call string
	Code Result
}

func (e *Error) Error() string { return fmt.Sprintf("gds: %s: %s (%d)", e.Call, e.Code, int32(e.Code)) }

// Sticky reports whether err holds a CUDA result that loses the context, reported by the driver or by cuFile.
func Sticky(err error) bool {
	if err == nil {
		return false
	}
	var e *Error
	var f *FileError
	return errors.As(err, &e) && e.Code.Sticky() || errors.As(err, &f) && f.CUDA.Sticky()
}
