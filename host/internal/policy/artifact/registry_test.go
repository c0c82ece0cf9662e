package artifact

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	real "github.com/google/go-containerregistry/pkg/registry"
	"oras.land/oras-go/v2/registry/remote"
	"oras.land/oras-go/v2/registry/remote/auth"
)

const most = 1 << 20

// serve runs a registry, whose answers pass through a filter.
func serve(t *testing.T, filter func(next http.Handler) http.Handler) Reference {
	t.Helper()
	t.Setenv("DOCKER_CONFIG", t.TempDir())
	var h http.Handler = real.New(real.Logger(log.New(io.Discard, "", 0)))
	if filter != nil {
		h = filter(h)
	}
	s := httptest.NewServer(h)
	t.Cleanup(s.Close)
	return Reference{Registry: strings.TrimPrefix(s.URL, "http://"), Repository: "policies/lru", Tag: "1"}
}

func pack(t *testing.T, signature []byte) *Artifact {
	t.Helper()
	a, err := Pack("lru", bytes.Repeat([]byte("module"), 10000), signature)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func same(a, b *Artifact) bool {
	return a.Digest == b.Digest && bytes.Equal(a.Manifest, b.Manifest) && bytes.Equal(a.Module, b.Module) && bytes.Equal(a.Signature, b.Signature)
}

// What was pushed comes back, by its digest and by its tag, which may move.
func TestPushAndPull(t *testing.T) {
	r := serve(t, nil)
	for _, a := range []*Artifact{pack(t, []byte("signature")), pack(t, nil)} {
		for range 2 { // the second push finds everything there
			if err := Push(t.Context(), r, a, Options{}); err != nil {
				t.Fatal(err)
			}
		}
		for _, r := range []Reference{r, r.At(a.Digest)} {
			got, err := Pull(t.Context(), r, most, Options{})
			if err != nil || !same(a, got) {
				t.Errorf("%s: %v", r, err)
			}
		}
		if _, err := Pull(t.Context(), r, int64(len(a.Module)-1), Options{}); !errors.Is(err, ErrManifest) {
			t.Errorf("a module above the limit: %v", err)
		}
	}
	if _, err := Pull(t.Context(), r.At("sha256:"+strings.Repeat("0", 64)), most, Options{}); !errors.Is(err, errRegistry) {
		t.Errorf("a digest that is not there: %v", err)
	}
}

// changed alters the body of answers to GETs of a path.
func changed(path string, change func([]byte) []byte) func(http.Handler) http.Handler {
	return func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.Method != http.MethodGet || !strings.Contains(r.URL.Path, path) {
				next.ServeHTTP(w, r)
				return
			}
			answer := httptest.NewRecorder()
			next.ServeHTTP(answer, r)
			body := change(answer.Body.Bytes())
			for k, v := range answer.Header() {
				w.Header()[k] = v
			}
			w.Header().Set("Content-Length", fmt.Sprint(len(body)))
			w.WriteHeader(answer.Code)
			w.Write(body)
		})
	}
}

// A registry that sends other bytes than those that were named is refused, whatever it changes.
func TestAlteredBytesAreRefused(t *testing.T) {
	flip := func(b []byte) []byte { b = bytes.Clone(b); b[len(b)/2] ^= 1; return b }
	for what, c := range map[string]struct {
		path   string
		change func([]byte) []byte
	}{
		"module":            {"/blobs/", func(b []byte) []byte { return cond(len(b) > 100, flip, b) }},
		"signature":         {"/blobs/", func(b []byte) []byte { return cond(len(b) < 100, flip, b) }},
		"manifest":          {"/manifests/", flip},
		"a longer module":   {"/blobs/", func(b []byte) []byte { return append(bytes.Clone(b), 'x') }},
		"a shorter one":     {"/blobs/", func(b []byte) []byte { return b[:len(b)-1] }},
		"no manifest":       {"/manifests/", func([]byte) []byte { return []byte("<html>") }},
		"an endless answer": {"/manifests/", func([]byte) []byte { return make([]byte, 1<<20) }},
	} {
		t.Run(what, func(t *testing.T) {
			r, a := serve(t, changed(c.path, c.change)), pack(t, []byte("signature"))
			if err := Push(t.Context(), r, a, Options{}); err != nil {
				t.Fatal(err)
			}
			if got, err := Pull(t.Context(), r.At(a.Digest), most, Options{}); err == nil {
				t.Errorf("pulled %d bytes", len(got.Module))
			}
			if got, err := Pull(t.Context(), r, most, Options{}); err == nil && !same(a, got) {
				t.Error("pulled something else by its tag")
			}
		})
	}
}

func cond(yes bool, f func([]byte) []byte, b []byte) []byte {
	if yes {
		return f(b)
	}
	return b
}

// A registry that hangs holds nobody longer than their context.
func TestHangingRegistry(t *testing.T) {
	release, asked := make(chan struct{}), make(chan struct{}, 10)
	r := serve(t, func(http.Handler) http.Handler {
		return http.HandlerFunc(func(http.ResponseWriter, *http.Request) { asked <- struct{}{}; <-release })
	})
	defer close(release)
	ctx, cancel := context.WithCancel(t.Context())
	go func() { <-asked; cancel() }()
	if _, err := Pull(ctx, r, most, Options{}); !errors.Is(err, context.Canceled) {
		t.Errorf("pull: %v", err)
	}
	if err := Push(ctx, r, pack(t, nil), Options{}); !errors.Is(err, context.Canceled) {
		t.Errorf("push: %v", err)
	}
}

// Credentials are those of docker's configuration.
func TestCredentials(t *testing.T) {
	r := serve(t, func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
			if user, password, _ := q.BasicAuth(); user != "me" || password != "secret" {
				w.Header().Set("WWW-Authenticate", `Basic realm="policies"`)
				w.WriteHeader(http.StatusUnauthorized)
				return
			}
			next.ServeHTTP(w, q)
		})
	})
	a := pack(t, nil)
	if err := Push(t.Context(), r, a, Options{}); !errors.Is(err, errRegistry) {
		t.Errorf("without credentials: %v", err)
	}
	file := fmt.Sprintf(`{"auths": {%q: {"auth": %q}}}`, r.Registry, base64.StdEncoding.EncodeToString([]byte("me:secret")))
	if err := os.WriteFile(filepath.Join(os.Getenv("DOCKER_CONFIG"), "config.json"), []byte(file), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := Push(t.Context(), r, a, Options{}); err != nil {
		t.Fatal(err)
	}
	if got, err := Pull(t.Context(), r, most, Options{}); err != nil || !same(a, got) {
		t.Error(err)
	}
}

// HTTP without TLS is for this machine, or for who asks for it, and then without credentials.
func TestPlainHTTP(t *testing.T) {
	t.Setenv("DOCKER_CONFIG", t.TempDir())
	for _, c := range []struct {
		registry           string
		flag               bool
		plain, credentials bool
	}{
		{"localhost:5000", false, true, true}, {"127.0.0.1", false, true, true}, {"[::1]:5000", false, true, true},
		{"registry.example.com", false, false, true}, {"registry.example.com:5000", true, true, false},
		{"localhost.example.com", false, false, true}, {"10.0.0.1:5000", false, false, true},
	} {
		repo, err := open(Reference{Registry: c.registry, Repository: "x"}, Options{PlainHTTP: c.flag})
		if err != nil {
			t.Fatal(err)
		}
		if has := credentialsOf(repo) != nil; repo.PlainHTTP != c.plain || has != c.credentials {
			t.Errorf("%s, flag %v: plain %v, credentials %v", c.registry, c.flag, repo.PlainHTTP, has)
		}
	}
}

// A registry may send its clients elsewhere for blobs, but not out of TLS.
func TestRedirects(t *testing.T) {
	from := func(url string) *http.Request { return httptest.NewRequest(http.MethodGet, url, nil) }
	if err := redirect(from("http://b/"), []*http.Request{from("https://a/")}); err == nil {
		t.Error("a redirect left TLS")
	}
	if err := redirect(from("https://b/"), []*http.Request{from("https://a/")}); err != nil {
		t.Error(err)
	}
	if err := redirect(from("https://b/"), make([]*http.Request, 10)); err == nil {
		t.Error("ten redirects and one more")
	}
}

func credentialsOf(r *remote.Repository) auth.CredentialFunc {
	return r.Client.(*auth.Client).Credential
}
