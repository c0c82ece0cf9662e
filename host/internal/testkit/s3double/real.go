package s3double

import (
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
)

// StartReal runs versitygw, with an empty bucket of the name that [Server] has by default, until the test ends. Its user has the
// key "key" and the secret "secret".
func StartReal(t testing.TB) (url string) {
	t.Helper()
	testenv.Need(t, testenv.VersityGW)
	dir := testenv.Dir(t)
	testenv.OK(t, os.MkdirAll(filepath.Join(dir, "data", "bucket"), 0o700))
	testenv.OK(t, os.Mkdir(filepath.Join(dir, "meta"), 0o700))
	l, err := net.Listen("tcp", "127.0.0.1:0")
	testenv.OK(t, err)
	at := l.Addr().String()
	testenv.OK(t, l.Close())
	c := exec.Command(filepath.Join(testenv.Root(), ".build", "bin", "versitygw"), "--port", at, "--quiet", "posix", "--sidecar", filepath.Join(dir, "meta"), filepath.Join(dir, "data"))
	c.Env = append(os.Environ(), "ROOT_ACCESS_KEY=key", "ROOT_SECRET_KEY=secret")
	testenv.OK(t, c.Start())
	t.Cleanup(func() {
		_ = c.Process.Kill()
		_ = c.Wait()
	})
	testenv.Until(t, "an answer of versitygw at "+at, func() bool {
		conn, err := net.Dial("tcp", at)
		if err == nil {
			_ = conn.Close()
		}
		return err == nil
	})
	return "http://" + at
}
