package s3double

import (
	"bufio"
	"bytes"
	"cmp"
	"crypto/md5"
	"encoding/hex"
	"encoding/pem"
	"encoding/xml"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// Object is what a server has under a key.
type Object struct {
	Body []byte
	ETag string
	Time time.Time
	Meta http.Header // x-amz-meta-*
}

type upload struct {
	key, id string
	meta    http.Header
	parts   map[int][]byte
	started time.Time
}

// Server holds the objects of one bucket.
type Server struct {
	URL    string
	Bucket string
	// Unconditional has it ignore If-None-Match and If-Match in requests that write, as servers of old did.
	Unconditional bool
	// Quirk is what a proxy before the server does: one of the constants.
	Quirk string
	// LeastPart is the least that a part which is not the last must have: 5 MiB.
	LeastPart int

	mu      sync.Mutex
	objects map[string]Object
	sorted  []string // keys of objects; nil: not sorted since one was added or removed
	uploads map[string]*upload
	count   map[string]int
	number  int
}

// Quirks of proxies.
const (
	WeakETags   = "weak ETags"   // which it makes of strong ones as it compresses
	NoMatch     = "no match"     // a write with If-Match is always refused
	WholeBodies = "whole bodies" // Range is ignored
)

// Start runs a server of an empty bucket until the test ends.
func Start(t testing.TB) *Server {
	s := newServer()
	h := httptest.NewServer(s)
	t.Cleanup(h.Close)
	s.URL = h.URL
	return s
}

// StartTLS is Start with TLS. Its certificate, which is in a file, is for example.com and the names below it.
func StartTLS(t testing.TB) (s *Server, certificate string) {
	s = newServer()
	h := httptest.NewTLSServer(s)
	t.Cleanup(h.Close)
	s.URL = h.URL
	certificate = filepath.Join(t.TempDir(), "ca.pem")
	block := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: h.Certificate().Raw})
	if err := os.WriteFile(certificate, block, 0o600); err != nil {
		t.Fatal(err)
	}
	return s, certificate
}

func newServer() *Server {
	return &Server{Bucket: "bucket", objects: map[string]Object{}, uploads: map[string]*upload{}, count: map[string]int{},
		LeastPart: 5 << 20}
}

// Objects are the objects that are there, by their keys.
func (s *Server) Objects() map[string]Object {
	s.mu.Lock()
	defer s.mu.Unlock()
	return maps.Clone(s.objects)
}

// Set puts an object, or removes it when body is nil, behind everybody's back.
func (s *Server) Set(key string, body []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if body == nil {
		delete(s.objects, key)
		s.sorted = nil
		return
	}
	s.put(key, body, s.objects[key].Meta)
}

// Uploads are the keys of multipart uploads that were neither completed nor aborted.
func (s *Server) Uploads() (keys []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, u := range s.uploads {
		keys = append(keys, u.key)
	}
	slices.Sort(keys)
	return keys
}

// Count is how many requests of a kind there were: GET, HEAD, PUT, DELETE, COPY, LIST, START, PART, COMPLETE, ABORT, UPLOADS.
func (s *Server) Count(kind string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.count[kind]
}

func (s *Server) put(key string, body []byte, meta http.Header) Object {
	sum := md5.Sum(body)
	o := Object{Body: body, ETag: `"` + hex.EncodeToString(sum[:]) + `"`, Time: time.Now(), Meta: meta}
	if _, there := s.objects[key]; !there {
		s.sorted = nil
	}
	s.objects[key] = o
	return o
}

type failure struct {
	XMLName xml.Name `xml:"Error"`
	Code    string
	Message string
}

func fail(w http.ResponseWriter, status int, code string) {
	w.Header().Set("Content-Type", "application/xml")
	w.WriteHeader(status)
	_ = xml.NewEncoder(w).Encode(failure{Code: code, Message: code})
}

func reply(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/xml")
	_ = xml.NewEncoder(w).Encode(v)
}

// bodyOf reads a request's body, which may be in signed chunks.
func bodyOf(r *http.Request) ([]byte, error) {
	if r.Header.Get("X-Amz-Decoded-Content-Length") == "" {
		return io.ReadAll(r.Body)
	}
	var out bytes.Buffer
	in := bufio.NewReader(r.Body)
	for {
		line, err := in.ReadString('\n')
		if err != nil {
			return nil, err
		}
		size, _, _ := strings.Cut(strings.TrimSpace(line), ";")
		n, err := strconv.ParseInt(size, 16, 64)
		if err != nil || n == 0 {
			return out.Bytes(), err
		}
		if _, err := io.CopyN(&out, in, n); err != nil {
			return nil, err
		}
		if _, err := in.Discard(2); err != nil {
			return nil, err
		}
	}
}

func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	path := strings.TrimPrefix(r.URL.Path, "/")
	if strings.HasPrefix(r.Host, s.Bucket+".") {
		path = s.Bucket + "/" + path
	}
	bucket, key, _ := strings.Cut(path, "/")
	if bucket != s.Bucket {
		fail(w, http.StatusNotFound, "NoSuchBucket")
		return
	}
	switch s.Quirk {
	case WeakETags:
		w = weakening{w}
	case WholeBodies:
		r.Header.Del("Range")
	case NoMatch:
		if r.Method == http.MethodPut && r.Header.Get("If-Match") != "" {
			r.Header.Set("If-Match", "never")
		}
	}
	body, err := bodyOf(r)
	if err != nil {
		fail(w, http.StatusBadRequest, "IncompleteBody")
		return
	}
	q := r.URL.Query()
	s.mu.Lock()
	defer s.mu.Unlock()
	kind, serve := "LIST", s.list
	switch {
	case key == "" && r.Method == http.MethodGet && q.Has("uploads"):
		kind, serve = "UPLOADS", s.listUploads
	case key == "" && r.Method == http.MethodGet && q.Has("location"):
		kind, serve = "LOCATION", func(w http.ResponseWriter, _ *http.Request, _ string, _ []byte) {
			reply(w, struct {
				XMLName xml.Name `xml:"LocationConstraint"`
			}{})
		}
	case key == "" && r.Method == http.MethodGet:
	case key == "":
		fail(w, http.StatusMethodNotAllowed, "MethodNotAllowed")
		return
	case r.Method == http.MethodPost && q.Has("uploads"):
		kind, serve = "START", s.start
	case r.Method == http.MethodPut && q.Has("uploadId"):
		kind, serve = "PART", s.part
	case r.Method == http.MethodPost:
		kind, serve = "COMPLETE", s.complete
	case r.Method == http.MethodDelete && q.Has("uploadId"):
		kind, serve = "ABORT", s.abort
	case r.Method == http.MethodPut && r.Header.Get("X-Amz-Copy-Source") != "":
		kind, serve = "COPY", s.copy
	case r.Method == http.MethodPut:
		kind, serve = "PUT", s.putObject
	case r.Method == http.MethodDelete:
		kind, serve = "DELETE", s.remove
	default:
		kind, serve = r.Method, s.get
	}
	s.count[kind]++
	serve(w, r, key, body)
}

type weakening struct{ http.ResponseWriter }

func (w weakening) weaken() {
	if etag := w.Header().Get("ETag"); etag != "" && !strings.HasPrefix(etag, "W/") {
		w.Header().Set("ETag", `W/"`+strings.Trim(etag, `"`)+`"`)
	}
}

func (w weakening) WriteHeader(code int) {
	w.weaken()
	w.ResponseWriter.WriteHeader(code)
}

func (w weakening) Write(b []byte) (int, error) {
	w.weaken()
	return w.ResponseWriter.Write(b)
}

// refused says that a condition of a request that writes does not hold, and answers it.
func (s *Server) refused(w http.ResponseWriter, r *http.Request, key string) bool {
	if s.Unconditional {
		return false
	}
	o, there := s.objects[key]
	switch match := r.Header.Get("If-Match"); {
	case match != "" && !there:
		fail(w, http.StatusNotFound, "NoSuchKey")
	case match != "" && strings.Trim(match, `"`) != strings.Trim(o.ETag, `"`), r.Header.Get("If-None-Match") == "*" && there:
		fail(w, http.StatusPreconditionFailed, "PreconditionFailed")
	default:
		return false
	}
	return true
}

func metaOf(r *http.Request) http.Header {
	meta := http.Header{}
	for name, values := range r.Header {
		if strings.HasPrefix(name, "X-Amz-Meta-") {
			meta[name] = values
		}
	}
	return meta
}

func (s *Server) putObject(w http.ResponseWriter, r *http.Request, key string, body []byte) {
	if !s.refused(w, r, key) {
		w.Header().Set("ETag", s.put(key, body, metaOf(r)).ETag)
		w.WriteHeader(http.StatusOK)
	}
}

func (s *Server) copy(w http.ResponseWriter, r *http.Request, key string, _ []byte) {
	from := strings.TrimPrefix(strings.TrimPrefix(r.Header.Get("X-Amz-Copy-Source"), "/"), s.Bucket+"/")
	src, ok := s.objects[from]
	if !ok {
		fail(w, http.StatusNotFound, "NoSuchKey")
		return
	}
	if s.refused(w, r, key) {
		return
	}
	o := s.put(key, src.Body, src.Meta)
	reply(w, struct {
		XMLName      xml.Name `xml:"CopyObjectResult"`
		ETag         string
		LastModified string
	}{ETag: o.ETag, LastModified: o.Time.UTC().Format(time.RFC3339)})
}

func (s *Server) remove(w http.ResponseWriter, r *http.Request, key string, _ []byte) {
	if s.refused(w, r, key) {
		return
	}
	delete(s.objects, key)
	s.sorted = nil
	w.WriteHeader(http.StatusNoContent)
}

func (s *Server) get(w http.ResponseWriter, r *http.Request, key string, _ []byte) {
	o, ok := s.objects[key]
	if !ok {
		fail(w, http.StatusNotFound, "NoSuchKey")
		return
	}
	if m := r.Header.Get("If-Match"); m != "" && strings.Trim(m, `"`) != strings.Trim(o.ETag, `"`) {
		fail(w, http.StatusPreconditionFailed, "PreconditionFailed")
		return
	}
	r.Header.Del("If-Match")
	maps.Copy(w.Header(), o.Meta)
	w.Header().Set("ETag", o.ETag)
	if r.Header.Get("Range") != "" && len(o.Body) == 0 {
		fail(w, http.StatusRequestedRangeNotSatisfiable, "InvalidRange")
		return
	}
	http.ServeContent(w, r, "", o.Time, bytes.NewReader(o.Body))
}

type listed struct {
	Key          string
	LastModified string
	ETag         string
	Size         int64
}

type prefixed struct{ Prefix string }

func (s *Server) list(w http.ResponseWriter, r *http.Request, _ string, _ []byte) {
	q := r.URL.Query()
	prefix, delimiter, after := q.Get("prefix"), q.Get("delimiter"), cmp.Or(q.Get("continuation-token"), q.Get("start-after"))
	most := 1000
	if n, err := strconv.Atoi(q.Get("max-keys")); err == nil {
		most = min(most, n)
	}
	out := struct {
		XMLName               xml.Name `xml:"ListBucketResult"`
		Name, Prefix          string
		KeyCount              int
		IsTruncated           bool
		NextContinuationToken string     `xml:",omitempty"`
		Contents              []listed   `xml:"Contents"`
		CommonPrefixes        []prefixed `xml:"CommonPrefixes"`
	}{Name: s.Bucket, Prefix: prefix}
	last := ""
	if s.sorted == nil {
		s.sorted = slices.Sorted(maps.Keys(s.objects))
	}
	from, _ := slices.BinarySearch(s.sorted, max(prefix, after))
	for _, key := range s.sorted[from:] {
		if !strings.HasPrefix(key, prefix) && key > prefix {
			break
		}
		rest, ok := strings.CutPrefix(key, prefix)
		if !ok || key <= after || after != "" && strings.HasSuffix(after, "/") && strings.HasPrefix(key, after) {
			continue
		}
		common := ""
		if i := strings.Index(rest, delimiter); delimiter != "" && i >= 0 {
			common = prefix + rest[:i+len(delimiter)]
		}
		if common != "" && common == last {
			continue
		}
		if out.KeyCount == most {
			out.IsTruncated, out.NextContinuationToken = true, last
			break
		}
		out.KeyCount++
		if last = key; common != "" {
			last = common
			out.CommonPrefixes = append(out.CommonPrefixes, prefixed{common})
			continue
		}
		o := s.objects[key]
		out.Contents = append(out.Contents, listed{key, o.Time.UTC().Format(time.RFC3339), o.ETag, int64(len(o.Body))})
	}
	reply(w, out)
}

func (s *Server) listUploads(w http.ResponseWriter, r *http.Request, _ string, _ []byte) {
	type entry struct{ Key, UploadId, Initiated string }
	out := struct {
		XMLName     xml.Name `xml:"ListMultipartUploadsResult"`
		Bucket      string
		IsTruncated bool
		Upload      []entry
	}{Bucket: s.Bucket}
	for _, u := range s.uploads {
		if strings.HasPrefix(u.key, r.URL.Query().Get("prefix")) {
			out.Upload = append(out.Upload, entry{u.key, u.id, u.started.UTC().Format(time.RFC3339)})
		}
	}
	reply(w, out)
}

func (s *Server) start(w http.ResponseWriter, r *http.Request, key string, _ []byte) {
	s.number++
	u := &upload{key: key, id: fmt.Sprintf("upload-%d", s.number), meta: metaOf(r), parts: map[int][]byte{}, started: time.Now()}
	s.uploads[u.id] = u
	reply(w, struct {
		XMLName               xml.Name `xml:"InitiateMultipartUploadResult"`
		Bucket, Key, UploadId string
	}{Bucket: s.Bucket, Key: key, UploadId: u.id})
}

func (s *Server) find(w http.ResponseWriter, r *http.Request, key string) *upload {
	u := s.uploads[r.URL.Query().Get("uploadId")]
	if u == nil || u.key != key {
		fail(w, http.StatusNotFound, "NoSuchUpload")
		return nil
	}
	return u
}

func (s *Server) part(w http.ResponseWriter, r *http.Request, key string, body []byte) {
	if u := s.find(w, r, key); u != nil {
		n, _ := strconv.Atoi(r.URL.Query().Get("partNumber"))
		u.parts[n] = body
		w.Header().Set("ETag", fmt.Sprintf(`"%x"`, md5.Sum(body)))
	}
}

func (s *Server) complete(w http.ResponseWriter, r *http.Request, key string, body []byte) {
	u := s.find(w, r, key)
	if u == nil || s.refused(w, r, key) {
		return
	}
	var ask struct {
		Part []struct {
			PartNumber int
			ETag       string
		}
	}
	if err := xml.Unmarshal(body, &ask); err != nil {
		fail(w, http.StatusBadRequest, "MalformedXML")
		return
	}
	var whole []byte
	for i, p := range ask.Part {
		part, ok := u.parts[p.PartNumber]
		if !ok || strings.Trim(p.ETag, `"`) != fmt.Sprintf("%x", md5.Sum(part)) {
			fail(w, http.StatusBadRequest, "InvalidPart")
			return
		}
		if len(part) < s.LeastPart && i < len(ask.Part)-1 {
			fail(w, http.StatusBadRequest, "EntityTooSmall")
			return
		}
		whole = append(whole, part...)
	}
	delete(s.uploads, u.id)
	o := s.put(key, whole, u.meta)
	reply(w, struct {
		XMLName           xml.Name `xml:"CompleteMultipartUploadResult"`
		Bucket, Key, ETag string
	}{Bucket: s.Bucket, Key: key, ETag: o.ETag})
}

func (s *Server) abort(w http.ResponseWriter, r *http.Request, key string, _ []byte) {
	if u := s.find(w, r, key); u != nil {
		delete(s.uploads, u.id)
		w.WriteHeader(http.StatusNoContent)
	}
}
