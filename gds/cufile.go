package gds

import (
	"fmt"
	"syscall"
	"unsafe"

	"github.com/ebitengine/purego"
)

// CuFile is libcufile with its driver open. There is one per process. Like every library here it is never closed;
// only its driver is.
type CuFile struct {
	lib   *library
	fn    cuFileFunctions
	errno uintptr // libc's function for the address of the calling thread's errno
}

type cuFileFunctions struct {
	open, close, useCount, version, properties  function
	handleRegister, handleDeregister            function
	bufRegister, bufDeregister, read, write     function
	setBool, setString                          function
	statsLevel, statsStart, statsReset, statsL3 function
}

// FileError is a failed cuFile call: with cuFile's own code, with CUDA's code if cuFile reports a CUDA failure, or
// with the errno of the read or write under it.
type FileError struct {
	Call  string
	Code  int32 // 5001 and up; 0: see Errno
	CUDA  Result
	Errno syscall.Errno
}

const (
	firstFileCode = 5000 // below cuFile's own codes and above every errno
	fileCUDAError = 5011 // CU_FILE_CUDA_DRIVER_ERROR: the only code with a CUDA code
)

func (e *FileError) Error() string {
	switch {
	case e.Code == 0:
		return fmt.Sprintf("gds: %s: %v", e.Call, e.Errno)
	case e.Code == fileCUDAError:
		return fmt.Sprintf("gds: %s: %s (%d): %s (%d)", e.Call, fileErrors[e.Code], e.Code, e.CUDA, int32(e.CUDA))
	}
	name, ok := fileErrors[e.Code]
	if !ok {
		name = "cuFile error"
	}
	return fmt.Sprintf("gds: %s: %s (%d)", e.Call, name, e.Code)
}

// Unwrap returns the errno, so that errors.Is(err, syscall.EIO) works.
func (e *FileError) Unwrap() error {
	if e.Code == 0 {
		return e.Errno
	}
	return nil
}

// Libcufile lists the names of libcufile, in the order in which they are tried.
var Libcufile = []string{"libcufile.so.0", "libcufile.so", "/usr/local/cuda/lib64/libcufile.so.0"}

// LoadCuFile loads the library from the first of the given files that loads, by default from [Libcufile]. Set
// parameters before [CuFile.Open].
func LoadCuFile(names ...string) (*CuFile, error) {
	if len(names) == 0 {
		names = Libcufile
	}
	lib, err := load(names, ErrNoCuFile)
	if err != nil {
		return nil, err
	}
	c := &CuFile{lib: lib}
	f := &c.fn
	if err := lib.resolve(map[string]*function{
		"cuFileDriverOpen": &f.open, "cuFileDriverClose_v2 cuFileDriverClose": &f.close,
		"cuFileDriverGetProperties": &f.properties, "cuFileHandleRegister": &f.handleRegister,
		"cuFileHandleDeregister": &f.handleDeregister, "cuFileBufRegister": &f.bufRegister,
		"cuFileBufDeregister": &f.bufDeregister, "cuFileRead": &f.read, "cuFileWrite": &f.write,
	}, map[string]*function{
		"cuFileUseCount": &f.useCount, "cuFileGetVersion": &f.version,
		"cuFileSetParameterBool": &f.setBool, "cuFileSetParameterString": &f.setString,
		"cuFileSetStatsLevel": &f.statsLevel,
		"cuFileStatsStart":    &f.statsStart, "cuFileStatsReset": &f.statsReset, "cuFileGetStatsL3": &f.statsL3,
	}); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNoCuFile, err)
	}
	if c.errno, err = purego.Dlsym(purego.RTLD_DEFAULT, "__errno_location"); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNoCuFile, err)
	}
	return c, nil
}

// call makes a call that returns a CUfileError_t: 8 bytes in one register, cuFile's code low and CUDA's high.
//
//go:uintptrescapes
func (c *CuFile) call(f *function, args ...uintptr) error {
	if f.addr == 0 {
		return fmt.Errorf("%w: %s", ErrSymbol, f.name)
	}
	r, _, _ := purego.SyscallN(f.addr, args...)
	code, cuda := int32(r), Result(int32(r>>32))
	if code == 0 { // the upper half is undefined then
		return nil
	}
	if code != fileCUDAError {
		cuda = 0
	}
	return &FileError{Call: f.name, Code: code, CUDA: cuda}
}

// callOn is call on a GPU's thread. A CUDA error that loses the context takes the GPU out of service, since every later
// call on that GPU fails with it.
//
//go:uintptrescapes
func (c *CuFile) callOn(t *Thread, f *function, args ...uintptr) error {
	err := c.call(f, args...)
	if Sticky(err) {
		t.gpu.markLost(err)
	}
	return err
}

// Open opens cuFile's driver on a thread of a GPU.
func (c *CuFile) Open(t *Thread) error { return c.callOn(t, &c.fn.open) }

// Close closes cuFile's driver. Release handles and buffers first.
func (c *CuFile) Close(t *Thread) error { return c.callOn(t, &c.fn.close) }

// Version returns 1000*major + 10*minor, or 0 if the library is too old to have a version.
func (c *CuFile) Version() (int, error) {
	if c.fn.version.addr == 0 {
		return 0, nil
	}
	v := new(int32)
	err := c.call(&c.fn.version, uintptr(unsafe.Pointer(v)))
	return int(*v), err
}

// Parameters for [CuFile.SetBool] and [CuFile.SetText], by their numbers in cuFile's header.
const (
	AllowCompatMode = 1 // bool
	StatsLevel      = 0 // size
	LogDir          = 2 // text
)

// SetBool sets a parameter. An open driver refuses it (5026).
func (c *CuFile) SetBool(parameter int, value bool) error {
	v := uintptr(0)
	if value {
		v = 1
	}
	return c.call(&c.fn.setBool, uintptr(parameter), v)
}

// SetText sets a parameter.
func (c *CuFile) SetText(parameter int, value string) error {
	b := append([]byte(value), 0)
	return c.call(&c.fn.setString, uintptr(parameter), uintptr(unsafe.Pointer(&b[0])))
}

// cuFileProperties is CUfileDrvProps_t.
type cuFileProperties struct {
	Major, Minor            uint32
	PollThreshold           uint64
	MaxDirectIO             uint64
	Status, Control         uint32
	Features                uint32
	MaxDeviceCache          uint32
	PerBufferCache          uint32
	MaxPinned               uint32
	MaxBatch, MaxBatchMilli uint32
}

// Properties of an open driver that decide the route of bytes.
type Properties struct {
	NVFSMajor, NVFSMinor uint32 // version of the nvidia-fs kernel module; 0 without it
	MaxDirectIOKB        uint64
	AllowCompat          bool
	MaxPinnedKB          uint32
}

// Properties queries the open driver.
func (c *CuFile) Properties() (Properties, error) {
	p := new(cuFileProperties)
	err := c.call(&c.fn.properties, uintptr(unsafe.Pointer(p)))
	const allowCompat = 1 << 1
	return Properties{p.Major, p.Minor, p.MaxDirectIO, p.Control&allowCompat != 0, p.MaxPinned}, err
}

// cuFileDescr is CUfileDescr_t.
type cuFileDescr struct {
	Type  int32
	_     int32
	FD    int32
	_     int32
	FSOps uintptr
}

// Register registers a file. The caller keeps the descriptor and closes it after [CuFile.Deregister].
func (c *CuFile) Register(t *Thread, fd int) (handle uintptr, err error) {
	d := &cuFileDescr{Type: 1, FD: int32(fd)}
	h := new(uintptr)
	err = c.callOn(t, &c.fn.handleRegister, uintptr(unsafe.Pointer(h)), uintptr(unsafe.Pointer(d)))
	return *h, err
}

// Deregister undoes Register. Nothing may be in flight on the file.
func (c *CuFile) Deregister(t *Thread, handle uintptr) {
	purego.SyscallN(c.fn.handleDeregister.addr, handle)
}

// RegisterBuffer registers device memory, so that cuFile needs no bounce buffer for it.
func (c *CuFile) RegisterBuffer(t *Thread, address uint64, size int64) error {
	return c.callOn(t, &c.fn.bufRegister, uintptr(address), uintptr(size), 0)
}

// DeregisterBuffer undoes RegisterBuffer.
func (c *CuFile) DeregisterBuffer(t *Thread, address uint64) error {
	return c.callOn(t, &c.fn.bufDeregister, uintptr(address))
}

// Read reads size bytes at offset off of a registered file to device memory, at bytes after base, and returns their
// number. base is the registered address, if the memory is registered. Fewer bytes without an error are the end of the
// file, or a short read.
func (c *CuFile) Read(t *Thread, handle uintptr, base uint64, size, off, at int64) (int64, error) {
	return c.move(t, &c.fn.read, handle, base, size, off, at)
}

// Write is the inverse of Read.
func (c *CuFile) Write(t *Thread, handle uintptr, base uint64, size, off, at int64) (int64, error) {
	return c.move(t, &c.fn.write, handle, base, size, off, at)
}

func (c *CuFile) move(t *Thread, f *function, handle uintptr, base uint64, size, off, at int64) (int64, error) {
	n := copy(t.args[:], []uintptr{handle, uintptr(base), uintptr(size), uintptr(off), uintptr(at)})
	r, _, _ := purego.SyscallN(f.addr, t.args[:n]...)
	switch done := int64(r); {
	case done >= 0:
		return done, nil
	case done == -1: // the errno of this thread, which may also hold one of cuFile's own codes
		at, _, _ := purego.SyscallN(c.errno)
		code := **(**int32)(unsafe.Pointer(&at))
		if code > firstFileCode {
			return 0, &FileError{Call: f.name, Code: code}
		}
		return 0, &FileError{Call: f.name, Errno: syscall.Errno(code)}
	default:
		return 0, &FileError{Call: f.name, Code: int32(-done)}
	}
}
