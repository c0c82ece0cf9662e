package nixl

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"unsafe"

	"github.com/ebitengine/purego"
	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/gds"
)

// Auto makes [Open] search for the library: by the system's loader, then in the active Python environment.
const Auto = "auto"

const libraryName = "libnixl_capi.so"

// call is a function of the C interface, by its name without nixl_capi_.
type call int

const (
	isStub call = iota
	createAgent
	destroyAgent
	createParams
	addParam
	destroyParams
	createBackend
	destroyBackend
	createRegistration
	addRegistration
	destroyRegistration
	registerMemory
	deregisterMemory
	localMetadata
	loadRemote
	invalidateRemote
	createList
	addToList
	destroyList
	createRequest
	postRequest
	requestStatus
	releaseRequest
	destroyRequest
	createOptions
	setCustom
	destroyOptions
	calls
)

var callNames = [calls]string{
	"is_stub", "create_configured_agent", "destroy_agent", "create_params", "params_add", "destroy_params", "create_backend",
	"destroy_backend", "create_reg_dlist", "reg_dlist_add_desc", "destroy_reg_dlist", "register_mem", "deregister_mem", "get_local_md",
	"load_remote_md", "invalidate_remote_md", "create_xfer_dlist", "xfer_dlist_add_desc", "destroy_xfer_dlist", "create_xfer_req",
	"post_xfer_req", "get_xfer_status", "release_xfer_req", "destroy_xfer_req", "create_opt_args", "opt_args_set_custom_param",
	"destroy_opt_args",
}

// Library is the C interface, loaded. It is never closed.
type Library struct {
	path string
	addr [calls]uintptr
	free uintptr // free of the C library, for returned memory
}

// These defaults turn off, unless the environment sets them, features of UCX that harm a Go process: handling of its
// signals, SIGHUP among them, and rewriting of munmap and others for a cache that would miss unmaps by Go's runtime.
// They also turn off warnings in the output, and emulation: READs over TCP become messages that the other side answers,
// and UCX 1.23 ends that process when it cannot ("Fatal: unexpected error: Endpoint timeout", after 22 readers were
// killed). Without emulation such READs are refused.
var ucxDefaults = map[string]string{
	"UCX_HANDLE_ERRORS": "none", "UCX_ERROR_SIGNALS": "", "UCX_DEBUG_SIGNO": "0", "UCX_MEM_EVENTS": "n", "UCX_LOG_FILE": "stderr",
	"UCX_PROTO_EMULATION_ENABLE": "n",
}

var opening sync.Mutex

// Open loads the library: path is its file, a directory with it, a Python environment where the package nixl-cu12 or nixl-cu13 is
// installed, or [Auto].
func Open(path string) (*Library, error) {
	opening.Lock()
	defer opening.Unlock()
	for name, value := range ucxDefaults {
		if err := gds.SetDefault(name, value); err != nil {
			return nil, err
		}
	}
	if unix.Access("/dev/shm", unix.W_OK) != nil { // UCX 1.23 does not leave out a transport that cannot create its file there: it fails
		if err := gds.SetDefault("UCX_TLS", "^posix"); err != nil {
			return nil, err
		}
	}
	var why []error
	for _, file := range places(path) {
		// Local symbols: those of the library and of its dependencies must not replace others of the process.
		const noDelete = 0x1000
		if info, err := os.Stat(file); err == nil && !info.Mode().IsRegular() { // opening a FIFO would block until another process writes to it
			why = append(why, fmt.Errorf("%s is no regular file", file))
			continue
		}
		handle, err := purego.Dlopen(file, purego.RTLD_NOW|purego.RTLD_LOCAL|noDelete)
		if err != nil {
			why = append(why, err)
			continue
		}
		l := &Library{path: file}
		return l, l.resolve(handle)
	}
	return nil, fmt.Errorf("%w: pip install nixl-cu13, and name the environment's directory in peers.nixl: %w", ErrNoLibrary,
		errors.Join(why...))
}

// places returns the files to try.
func places(path string) (list []string) {
	if path == Auto {
		list = append(list, libraryName)
		if path = os.Getenv("VIRTUAL_ENV"); path == "" {
			return list
		}
	}
	if info, err := os.Stat(path); err != nil || !info.IsDir() {
		return append(list, path)
	}
	found, _ := filepath.Glob(filepath.Join(path, "lib", "python3*", "site-packages", ".nixl_cu1*.mesonpy.libs", libraryName))
	return append(append(list, found...), filepath.Join(path, libraryName))
}

func (l *Library) resolve(handle uintptr) (err error) {
	for c, name := range callNames {
		if l.addr[c], err = purego.Dlsym(handle, "nixl_capi_"+name); err != nil {
			return fmt.Errorf("%w: %s: nixl_capi_%s: want NIXL 1.5 or newer", ErrSymbol, l.path, name)
		}
	}
	if l.free, err = purego.Dlsym(purego.RTLD_DEFAULT, "free"); err != nil {
		return fmt.Errorf("%w: free: %w", ErrSymbol, err)
	}
	if r, _, _ := purego.SyscallN(l.addr[isStub]); r&0xff != 0 {
		return fmt.Errorf("%w: %s", ErrStub, l.path)
	}
	return nil
}

// do makes a call. Its pointers stay where they are until it returns.
//
//go:uintptrescapes
func (l *Library) do(c call, args ...uintptr) error {
	if s := l.status(c, args...); s != 0 {
		return &Error{callNames[c], s}
	}
	return nil
}

//go:uintptrescapes
func (l *Library) status(c call, args ...uintptr) Status {
	r, _, _ := purego.SyscallN(l.addr[c], args...)
	return Status(int32(r))
}

// text returns a string as a C string.
func text(s string) unsafe.Pointer { return unsafe.Pointer(unsafe.SliceData(append([]byte(s), 0))) }

// Path returns the file of the library.
func (l *Library) Path() string { return l.path }

var wheelVersion = regexp.MustCompile(`nixl_cu1\d-([0-9.]+)\.dist-info$`)

// Version returns NIXL's version from the directory of its wheel, since the library does not have it; "" if there is
// none.
func (l *Library) Version() string {
	found, _ := filepath.Glob(filepath.Join(filepath.Dir(l.path), "..", "nixl_cu1*.dist-info"))
	for _, name := range found {
		if m := wheelVersion.FindStringSubmatch(name); m != nil {
			return m[1]
		}
	}
	return ""
}

// mapped returns the first mapped file of the process with a prefix of its name.
func mapped(prefix string) string {
	maps, _ := os.ReadFile("/proc/self/maps") // exists, since the library could be loaded
	for line := range strings.Lines(string(maps)) {
		if _, file, ok := strings.Cut(line, "/"); ok {
			if file = "/" + strings.TrimSpace(file); strings.HasPrefix(filepath.Base(file), prefix) {
				return file
			}
		}
	}
	return ""
}
