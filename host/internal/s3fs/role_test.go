package s3fs

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
)

// askers count by which keys a server's requests are signed.
type askers struct {
	*httptest.Server
	mu   sync.Mutex
	keys map[string]string // by the names that they ask for, and themselves
}

func startAskers(t *testing.T) *askers {
	a := &askers{keys: map[string]string{}}
	a.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, key, _ := strings.Cut(r.Header.Get("Authorization"), "Credential=")
		key, _, _ = strings.Cut(key, "/")
		a.mu.Lock()
		a.keys[filepath.Base(r.URL.Path)+" "+key] = key
		a.mu.Unlock()
		w.WriteHeader(http.StatusNotFound)
	}))
	t.Cleanup(a.Close)
	return a
}

// of are the keys by which requests for a name were signed.
func (a *askers) of(name string) (keys string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for at, key := range a.keys {
		if strings.HasPrefix(at, name+" ") {
			keys += "<" + key + ">"
		}
	}
	return keys
}

// load asks the server for something until the returned function is called.
func load(f *FS) (end func()) {
	stop, group := make(chan struct{}), sync.WaitGroup{}
	for range 4 {
		group.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
					_, _ = f.Stat(top + "/load")
				}
			}
		})
	}
	return func() {
		close(stop)
		group.Wait()
	}
}

// Keys of a role are asked for again before they end, while requests go on: none has none, and once the new ones are there none has the old.
func TestRoleIsRenewed(t *testing.T) {
	for _, name := range []string{"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY", "AWS_SECRET_KEY", "AWS_PROFILE", "AWS_WEB_IDENTITY_TOKEN_FILE",
		"AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"} {
		t.Setenv(name, "")
	}
	for _, name := range []string{"AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"} {
		t.Setenv(name, filepath.Join(t.TempDir(), "none"))
	}
	const life = 3 * time.Second // of the first ones; of the others an hour
	var asked atomic.Int64
	role := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		n, ends := asked.Add(1), time.Now().Add(time.Hour)
		if n == 1 {
			ends = time.Now().Add(life)
		}
		fmt.Fprintf(w, `{"Code":"Success","AccessKeyId":"role-%d","SecretAccessKey":"s","Token":"t","Expiration":%q}`, n, ends.UTC().Format(time.RFC3339Nano))
	}))
	defer role.Close()
	t.Setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", role.URL)
	server := startAskers(t)
	f, err := Open(Config{Path: top, Endpoint: server.URL, PathStyle: true})
	must(t, err)
	began := time.Now()
	end := load(f)
	ask := func(name string) string {
		_, _ = f.Stat(top + "/" + name)
		return server.of(name)
	}
	if got := ask("first"); got != "<role-1>" {
		t.Errorf("at first signed by %s", got)
	}
	testenv.Until(t, "the role's next keys", func() bool { return asked.Load() == 2 })
	t.Logf("keys that last %s were asked for again after %s", life, time.Since(began))
	for n := range 20 {
		if got := ask(fmt.Sprintf("then-%d-", n)); n > 0 && got != "<role-2>" {
			t.Errorf("then signed by %s, want the new keys", got)
		}
	}
	end()
	if got := server.of("load"); strings.Contains(got, "<>") || asked.Load() != 2 {
		t.Errorf("keys of the load: %s, asked for %d times", got, asked.Load())
	}
	must(t, f.Close())
}
