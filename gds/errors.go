package gds

import (
	"errors"
	"fmt"
)

// Errors of loading the libraries.
var (
	// ErrNoDriver means that libcuda cannot be loaded: no NVIDIA driver is installed.
	ErrNoDriver = errors.New("gds: no CUDA driver")
	// ErrNoCuFile means that libcufile cannot be loaded.
	ErrNoCuFile = errors.New("gds: no cuFile library")
	// ErrSymbol means that a library is too old and lacks a function.
	ErrSymbol = errors.New("gds: library lacks a function")
	// ErrNoGPU means that no GPU has the wanted UUID.
	ErrNoGPU = errors.New("gds: no such GPU")
)

// Errors of using a GPU.
var (
	// ErrLost means that the GPU's context is lost for good after a sticky error.
	ErrLost = errors.New("gds: GPU is out of service")
	// ErrClosed means that the GPU is closed.
	ErrClosed = errors.New("gds: GPU is closed")
	// ErrImport means that a memory handle is not valid or belongs to another GPU.
	ErrImport = errors.New("gds: memory cannot be imported")
	// ErrStopped means that a batch was stopped by its flag.
	ErrStopped = errors.New("gds: batch was stopped")
	// ErrUnpinned means that memory is not registered with the driver.
	ErrUnpinned = errors.New("gds: memory is not registered")
	// ErrShort means that cuFile moved fewer bytes than requested.
	ErrShort = errors.New("gds: short transfer")
	// ErrHung means that cuFile did not return in time.
	ErrHung = errors.New("gds: cuFile does not answer")
	// ErrNoSlot means that the device memory for slots is in use, or too small for the file.
	ErrNoSlot = errors.New("gds: no free slot")
	// ErrSum means that bytes in device memory have a wrong checksum.
	ErrSum = errors.New("gds: another checksum")
	// ErrCodec means that no encoder writes such stored bytes or such a row for them.
	ErrCodec = errors.New("gds: no stored extent")
	// ErrConfig means that the configuration is not valid.
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
