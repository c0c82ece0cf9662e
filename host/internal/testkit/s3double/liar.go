package s3double

import (
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
)

// Liar is in front of a server, and answers as the protocol lets it, not as it should: by its seed.
type Liar struct {
	URL string

	server *Server
	mu     sync.Mutex
	random *rand.Rand
	honest bool
	lies   int
}

// StartLiar runs a liar until the test ends. It is honest at first.
func StartLiar(t testing.TB, server *Server, seed uint64) *Liar {
	l := &Liar{server: server, random: rand.New(rand.NewPCG(seed, 53)), honest: true}
	h := httptest.NewServer(l)
	l.URL = h.URL
	t.Cleanup(func() { h.CloseClientConnections(); h.Close() })
	return l
}

// Lie has it lie, or be honest again.
func (l *Liar) Lie(lies bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.honest = !lies
}

// Lies is how often it has lied.
func (l *Liar) Lies() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.lies
}

func (l *Liar) draw(n int) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.random.IntN(n)
}

func (l *Liar) lying() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.honest || l.random.IntN(3) == 0 {
		return false
	}
	l.lies++
	return true
}

// ServeHTTP implements [http.Handler].
func (l *Liar) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if !l.lying() {
		l.server.ServeHTTP(w, r)
		return
	}
	_, key, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, "/"), "/")
	a := httptest.NewRecorder()
	switch l.draw(4) {
	case 0: // it does nothing, and says that it has
		_, _ = io.Copy(io.Discard, r.Body)
		a.Code = []int{200, 204, 206, 304, 404, 409, 412, 416, 403, 500, 503}[l.draw(11)]
		a.Header().Set("ETag", `"00000000000000000000000000000000"`)
		if l.draw(2) == 0 {
			_, _ = a.WriteString("<Error><Code>\x1b[31mNo</Code><Message>a\nERROR forged</Message></Error>")
		}
	case 1: // it does something else
		if r.Method == http.MethodGet && key != "" {
			r.URL.Path = "/" + l.server.Bucket + "/" + l.another(key)
		}
		l.server.ServeHTTP(a, r)
	default:
		l.server.ServeHTTP(a, r)
	}
	body := a.Body.Bytes()
	if key == "" {
		body = l.list(body)
	} else if len(body) > 0 {
		body = l.twist(slices.Clone(body))
	}
	head := a.Header()
	switch l.draw(8) {
	case 0:
		head.Del("ETag")
	case 1:
		head.Set("ETag", fmt.Sprintf(`"%032x"`, l.draw(1<<30)))
	case 2:
		head.Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", l.draw(1<<20), l.draw(1<<30), l.draw(1<<30)))
	case 3:
		head.Set("Last-Modified", []string{"Thu, 01 Jan 1970 00:00:00 GMT", "Fri, 31 Dec 9999 23:59:59 GMT", "then"}[l.draw(3)])
	case 4:
		for name := range head {
			if strings.HasPrefix(name, "X-Amz-Meta-") {
				head.Set(name, strings.Repeat("9", 1+l.draw(30)))
			}
		}
	}
	maps.Copy(w.Header(), head)
	w.Header().Set("Content-Length", strconv.Itoa(len(body)))
	if r.Method == http.MethodHead && l.draw(2) == 0 {
		w.Header().Set("Content-Length", strconv.FormatInt(int64(1)<<l.draw(63), 10))
	}
	if bodiless := a.Code == http.StatusNoContent || a.Code == http.StatusNotModified; bodiless {
		w.Header().Del("Content-Length")
		body = nil
	}
	w.WriteHeader(a.Code)
	_, _ = w.Write(body)
}

// another is the key of an object, perhaps the same.
func (l *Liar) another(key string) string {
	keys := slices.Sorted(maps.Keys(l.server.Objects()))
	if len(keys) == 0 {
		return key
	}
	return keys[l.draw(len(keys))]
}

// twist makes other bytes of an object's.
func (l *Liar) twist(b []byte) []byte {
	switch at := l.draw(len(b)); l.draw(6) {
	case 0:
		b[at] ^= 1 << l.draw(8)
	case 1:
		return b[:at]
	case 2:
		return append(b, b...)
	case 3:
		clear(b)
	case 4:
		copy(b[at:], b)
	}
	return b
}

// list makes another list of one.
func (l *Liar) list(b []byte) []byte {
	fault := []Fault{"", SameToken, Foreign, Negative}[l.draw(4)]
	if change, lies := lists[fault]; lies {
		return change.pattern.ReplaceAll(b, []byte(change.to))
	}
	text := string(b)
	for _, lie := range [][2]string{{"<Size>", "<Size>9"}, {"<Key>", "<Key>../"}, {"<Contents>", "<Contents><Size>1</Size>"}, {"</Key>", "&#x202e;</Key>"},
		{"<IsTruncated>false", "<IsTruncated>true"}, {"<ETag>", "<ETag>0"}, {"List", "Lost"}, {"</", "<"}} {
		if l.draw(4) == 0 {
			text = strings.Replace(text, lie[0], lie[1], 1+l.draw(3))
		}
	}
	return []byte(text)
}
