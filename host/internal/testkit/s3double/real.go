package s3double

import (
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

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
	answer, err := http.Get("http://" + at)
	testenv.OK(t, err)
	testenv.OK(t, answer.Body.Close())
	date, err := http.ParseTime(answer.Header.Get("Date"))
	testenv.OK(t, err)
	if off := time.Since(date).Abs(); off > time.Hour {
		t.Skipf("missing: a server with this test's clock: the server's is %s off", off.Round(time.Hour))
	}
	return "http://" + at
}
