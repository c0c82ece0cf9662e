package s3fs

import (
	"errors"
	"io/fs"
	"os"
	"testing"
	"time"

	"github.com/kvhost/kvhost/host/internal/testkit/certificates"
	"github.com/kvhost/kvhost/host/internal/testkit/s3double"
)

// Who may sign the server's certificate is as the file says while the host runs.
func TestSignersAreRenewed(t *testing.T) {
	s, file := s3double.StartTLS(t)
	t.Setenv("AWS_ACCESS_KEY_ID", "key")
	t.Setenv("AWS_SECRET_ACCESS_KEY", "secret")
	right, err := os.ReadFile(file)
	must(t, err)
	f, err := Open(Config{Path: top, Endpoint: s.URL, CAFile: file, PathStyle: true})
	must(t, err)
	f.budget = 0
	for i, when := range []struct {
		holds []byte
		works bool
	}{{right, true}, {certificates.New(t).PEM, false}, {[]byte("half"), false}, {right, true}} {
		at := time.Now().Add(time.Duration(i) * time.Hour)
		must(t, errors.Join(os.WriteFile(file, when.holds, 0o600), os.Chtimes(file, at, at)))
		f.transport.CloseIdleConnections()
		f.outage.Store(nil)
		if _, err := f.Stat(top + "/none"); errors.Is(err, fs.ErrNotExist) != when.works {
			t.Errorf("file %d: got %v, want an answer: %v", i, err, when.works)
		}
	}
	must(t, f.Close())
}
