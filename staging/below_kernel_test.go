package staging_test

import (
	"errors"
	"os"
	"os/exec"
	"runtime"
	"testing"
	"unsafe"

	"github.com/kvhost/kvhost/staging"
	"golang.org/x/sys/unix"
)

// withoutOpenat2 is set for the process that must do without it.
const withoutOpenat2 = "KVHOST_TEST_WITHOUT_OPENAT2"

// A kernel that cannot open below a directory is named, and nothing is opened in another way.
func TestKernelWithoutOpenat2(t *testing.T) {
	if os.Getenv(withoutOpenat2) == "" {
		cmd := exec.Command(os.Args[0], "-test.run=^TestKernelWithoutOpenat2$", "-test.v")
		cmd.Env = append(os.Environ(), withoutOpenat2+"=1")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("want the process without openat2 to pass, got %v\n%s", err, out)
		}
		return
	}
	dir := t.TempDir()
	must(t, os.WriteFile(dir+"/file", nil, 0o600))
	forbidOpenat2(t)
	_, err := staging.Below(dir).OpenFile(dir+"/file", os.O_RDONLY, 0)
	if !errors.Is(err, staging.ErrKernel) {
		t.Errorf("want %v, got %v", staging.ErrKernel, err)
	}
}

// forbidOpenat2 makes the call fail for the whole process as one that the kernel does not have.
func forbidOpenat2(t *testing.T) {
	t.Helper()
	runtime.LockOSThread() // both calls are of a thread
	defer runtime.UnlockOSThread()
	filter := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS}, // the call's number
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.SYS_OPENAT2, Jf: 1},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ERRNO | uint32(unix.ENOSYS)},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW},
	}
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	must(t, unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
	if _, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC,
		uintptr(unsafe.Pointer(&program))); errno != 0 {
		t.Fatal(errno)
	}
}
