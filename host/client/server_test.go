package client_test

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/kv"
)

// listenAsNobody has another user listen, as the kernel sees it.
func listenAsNobody(t *testing.T, socket string) {
	t.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	as := func(uid uintptr) {
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, ^uintptr(0), uid, ^uintptr(0)); errno != 0 { // of this thread alone
			t.Fatal(errno)
		}
	}
	as(testenv.Nobody)
	l, err := net.Listen("unix", socket)
	as(0)
	testenv.OK(t, err)
	t.Cleanup(func() { _ = l.Close() })
}

// TestForeignSocket: a session with another user's process is refused before it has sent a byte, unless that user is named, or has the directory of root.
func TestForeignSocket(t *testing.T) {
	testenv.Need(t, testenv.Users)
	dir := testenv.Dir(t)
	testenv.OK(t, os.Chmod(dir, 0o777))
	socket := filepath.Join(dir, "s")
	listenAsNobody(t, socket)
	ctx := testenv.Context(t)
	hello := client.Hello{Socket: socket, Engine: "e", Role: "r", Namespace: kv.Namespace{
		Model: "m", DType: "f", KeyBytes: 32, TokensPerBlock: 1, Groups: []kv.Group{{Geometry: kv.Uniform(1, 1, 1, 4096)}}}}
	if _, err := client.Dial(ctx, hello); !errors.Is(err, client.ErrForeign) {
		t.Errorf("a session at another user's socket: got %v, want %v", err, client.ErrForeign)
	}
}
