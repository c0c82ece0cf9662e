package s3fs

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"

	"github.com/kvhost/kvhost/host/internal/regular"
)

// Limits of requests.
const (
	dialLimit    = 3 * time.Second
	answerLimit  = 4 * time.Second // longest wait for the first byte, and between two parts of a body
	leastRate    = 1 << 20         // bytes per second at which a body must be sent
	joining      = 8 << 20         // extra time for a server that copies or joins bytes before it answers, as a number of sent bytes
	mostHeaders  = 64 << 10        // bytes of an answer's headers
	mostError    = 4 << 10         // bytes that are read of an error
	mostAnswer   = 2 << 20         // bytes that are read of another answer, unless it is an object: a page of a list has 1,000 short keys
	outageRest   = time.Second
	outageLimit  = time.Second // replaces answerLimit during an outage
	firstPause   = 50 * time.Millisecond
	longestPause = 2 * time.Second
)

// Request is a kind of request. Servers bill them by kind.
type Request int

// Kinds of requests.
const (
	Get Request = iota
	Head
	Put
	Part // a part of a multipart upload, or its start or end
	Copy
	List
	Delete
	requests
)

func (r Request) String() string {
	return [...]string{"get", "head", "put", "part", "copy", "list", "delete"}[r]
}

// Stats count since the start.
type Stats struct {
	Requests      map[Request]uint64 // attempts
	Failed        map[Request]uint64 // attempts with an error or without an answer
	Read, Written uint64             // bytes of bodies
}

type client struct {
	core      *minio.Core
	bucket    string
	budget    time.Duration // see Config.Budget
	answer    time.Duration // longest wait for the first byte of an answer
	transport *http.Transport
	may       func(key string) error // returns the reason why an object must not be written or removed now; nil means that all may

	hedge hedge
	*counters
	outage atomic.Pointer[outage] // the present outage, or nil
}

// counters are shared by all clients of a file system.
type counters struct {
	made, failed  [requests]atomic.Uint64
	read, written atomic.Uint64
}

// apart returns a client of the same bucket that may write at any time. It has time limits of its own, and detects outages by
// itself.
func (c *client) apart(budget, answer time.Duration) *client {
	return &client{core: c.core, bucket: c.bucket, budget: budget, answer: answer, transport: c.transport, counters: c.counters}
}

// outage records a request that failed with all its attempts. For a moment, other requests fail at once, so that a caller that
// tries many objects after a failure does not wait for each. After that, requests have a short time limit until one succeeds.
type outage struct {
	at  time.Time
	err error
}

// newClient returns the client for a configuration. It sends no request.
func newClient(c *Config, bucket string) (*client, error) {
	endpoint := cmp.Or(c.Endpoint, "https://s3.amazonaws.com")
	u, err := url.Parse(endpoint)
	if err != nil || u.Host == "" || u.Path != "" && u.Path != "/" || u.Scheme != "http" && u.Scheme != "https" {
		return nil, refuse("endpoint", "%q, want https://host or http://host, with a port or without", endpoint)
	}
	transport := &http.Transport{
		Proxy: http.ProxyFromEnvironment, DialContext: (&net.Dialer{Timeout: dialLimit}).DialContext,
		TLSHandshakeTimeout: dialLimit, ExpectContinueTimeout: time.Second,
		MaxIdleConnsPerHost: 64, IdleConnTimeout: 30 * time.Second, DisableCompression: true, MaxResponseHeaderBytes: mostHeaders,
		ReadBufferSize: 64 << 10, WriteBufferSize: 64 << 10,
	}
	if c.CAFile != "" {
		signers, err := regular.Renew(func() (*x509.CertPool, error) { return readSigners(c.CAFile) }, c.Log, c.CAFile)
		if err != nil {
			return nil, err
		}
		transport.TLSClientConfig = &tls.Config{
			InsecureSkipVerify: true, // VerifyConnection verifies instead, with the current signers
			VerifyConnection:   func(s tls.ConnectionState) error { return verify(s, signers.Now()) },
		}
	}
	lookup := minio.BucketLookupDNS
	switch {
	case c.PathStyle:
		lookup = minio.BucketLookupPath
	case c.Endpoint == "":
		lookup = minio.BucketLookupAuto // by path if the bucket's name does not match AWS's certificate
	}
	made := &client{bucket: bucket, budget: c.Budget, answer: answerLimit, transport: transport, counters: &counters{}}
	made.core, err = minio.NewCore(u.Host, &minio.Options{
		// The same order as in the AWS SDKs: environment, profile, web identity, containers, instances.
		Creds: credentials.NewChainCredentials([]credentials.Provider{
			&credentials.EnvAWS{}, &profile{}, &credentials.IAM{Client: &http.Client{Timeout: dialLimit}},
		}),
		Secure: u.Scheme == "https", Transport: limited{transport, made}, MaxRetries: 1, BucketLookup: lookup,
		Region: cmp.Or(c.Region, os.Getenv("AWS_REGION"), os.Getenv("AWS_DEFAULT_REGION"), "us-east-1"),
	})
	if err != nil {
		return nil, refuse("endpoint", "%v", err)
	}
	return made, nil
}

// readSigners reads the certificates of the authorities that may sign the server's certificate.
func readSigners(file string) (*x509.CertPool, error) {
	pem, err := os.ReadFile(file)
	if err != nil {
		return nil, refuse("ca_file", "%v", err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		return nil, refuse("ca_file", "%s holds no certificate", file)
	}
	return pool, nil
}

// verify verifies a server's certificate like crypto/tls, which supports only a fixed set of signers.
func verify(s tls.ConnectionState, signers *x509.CertPool) error {
	o := x509.VerifyOptions{DNSName: s.ServerName, Roots: signers, Intermediates: x509.NewCertPool()}
	for _, c := range s.PeerCertificates[1:] {
		o.Intermediates.AddCert(c)
	}
	_, err := s.PeerCertificates[0].Verify(o)
	return err
}

// limited gives a deadline to requests that have none, because the library lists without a context. It cuts answers off, because
// the library reads and decodes them to their end.
type limited struct {
	http.RoundTripper
	client *client
}

// RoundTrip implements [http.RoundTripper].
func (l limited) RoundTrip(q *http.Request) (*http.Response, error) {
	if _, has := q.Context().Deadline(); !has {
		ctx, cancel := context.WithCancel(q.Context())
		time.AfterFunc(l.client.answers(), cancel)
		q = q.WithContext(ctx)
	}
	r, err := l.RoundTripper.RoundTrip(q)
	if err != nil {
		return nil, err
	}
	if most := int64(mostAnswer); q.Method != http.MethodGet || q.URL.RawQuery != "" || r.StatusCode >= http.StatusMultipleChoices {
		if r.StatusCode >= http.StatusMultipleChoices {
			most = mostError
		}
		r.Body = struct {
			io.Reader
			io.Closer
		}{io.LimitReader(r.Body, most), r.Body}
	}
	return r, nil
}

func (c *client) Stats() Stats {
	s := Stats{Requests: map[Request]uint64{}, Failed: map[Request]uint64{}, Read: c.read.Load(), Written: c.written.Load()}
	for r := range requests {
		s.Failed[r] = c.failed[r].Load() // read first, so that Failed never exceeds Requests
		s.Requests[r] = c.made[r].Load()
	}
	return s
}

// answers returns the longest wait for the first byte of an answer.
func (c *client) answers() time.Duration {
	if c.outage.Load() != nil {
		return min(c.answer, outageLimit)
	}
	return c.answer
}

// do repeats a request until it succeeds, fails for good, or the budget is used up. send is the number of sent bytes. An
// attempt may take the time to send them, and the time until the answer begins.
func (c *client) do(kind Request, send int, once func(ctx context.Context) error) error {
	return c.doOn("", kind, send, once)
}

// doOn is do for a request that writes or removes an object. It stops when that is no longer allowed.
func (c *client) doOn(key string, kind Request, send int, once func(ctx context.Context) error) (err error) {
	if out := c.outage.Load(); out != nil && time.Since(out.at) < outageRest {
		return out.err
	}
	limit := c.answers() + time.Duration(send)*time.Second/leastRate
	whole, cancel := context.WithTimeout(context.Background(), max(c.budget, limit))
	defer cancel()
	for pause := firstPause; ; pause = min(2*pause, longestPause) {
		if c.may != nil && key != "" {
			if no := c.may(key); no != nil {
				return cmp.Or(err, no) // the error of an earlier attempt, with an unknown result, matters more
			}
		}
		ctx, end := context.WithTimeout(whole, limit)
		err = once(ctx)
		end()
		c.made[kind].Add(1)
		if err == nil {
			c.outage.Store(nil)
			return nil
		}
		c.failed[kind].Add(1)
		if !passing(err) {
			return err
		}
		wait := pause/2 + rand.N(pause)
		if deadline, _ := whole.Deadline(); time.Until(deadline) < wait+firstPause {
			c.outage.Store(&outage{time.Now(), err})
			return err
		}
		time.Sleep(wait)
	}
}

// version is a version of an object, as described by an answer.
type version struct {
	size     int64
	etag     string
	id       uint64 // number of the file that the object was made from; otherwise a hash of the ETag
	modified time.Time
}

// idMeta is the metadata key for the number of the file that an object was made from. After a request without an answer, the
// number shows whether the request took effect.
const idMeta = "Kvhost-File"

// strong returns the original of an ETag. A proxy may have marked it as weak, and no condition matches a weak one.
func strong(etag string) string { return strings.TrimPrefix(strings.TrimPrefix(etag, "W/"), `"`) }

func versionOf(o *minio.ObjectInfo) version {
	v := version{size: o.Size, etag: strong(o.ETag), modified: o.LastModified}
	var err error
	if v.id, err = strconv.ParseUint(o.Metadata.Get("X-Amz-Meta-"+idMeta), 16, 64); err != nil {
		for _, b := range []byte(o.ETag) { // FNV-1a
			v.id = (v.id ^ uint64(b)) * 1099511628211
		}
	}
	return v
}

// head requests the description of an object.
func (c *client) head(key string) (v version, err error) {
	err = c.do(Head, 0, func(ctx context.Context) error {
		o, err := c.core.StatObject(ctx, c.bucket, key, minio.StatObjectOptions{})
		v = versionOf(&o)
		return err
	})
	return v, err
}

// get reads bytes of an object. If an ETag is given, it reads only that version. It returns fewer bytes than requested only at
// the end of the object. If a body ends early, it requests the rest.
func (c *client) get(key, etag string, p []byte, off int64) (n int, v version, err error) {
	err = c.do(Get, len(p), func(ctx context.Context) error {
		s, at, err := c.begin(ctx, key, etag, off+int64(n), len(p)-n)
		if err != nil {
			return err
		}
		defer s.close()
		v, etag = at, at.etag // the rest must come from the same version
		m, err := s.read(p[n:])
		n += m
		return err
	})
	return n, v, err
}

// open begins to read an object. It reads the first bytes to head. If more of the requested bytes follow, rest is a stream of
// them.
func (c *client) open(key string, head []byte, most int) (n int, rest *stream, v version, err error) {
	err = c.do(Get, 0, func(ctx context.Context) (err error) {
		while, stop := context.WithCancel(context.Background())
		bound := context.AfterFunc(ctx, stop) // the attempt's limit applies only to the first bytes
		if rest, v, err = c.begin(while, key, "", 0, most); err != nil {
			stop()
			return stalled(ctx, err)
		}
		if n, err = rest.read(head); err != nil || rest.left == 0 || !bound() {
			rest.close()
			stop()
			rest = nil
		}
		return stalled(ctx, err)
	})
	return n, rest, v, err
}

// stream is a body that is being read. Its request ends if no byte arrives for answerLimit.
type stream struct {
	client *client
	ctx    context.Context
	stop   func()
	stall  *time.Timer
	body   io.ReadCloser
	left   int
}

// ask requests up to most bytes of an object.
func (c *client) ask(ctx context.Context, key, etag string, off int64, most int) (*stream, version, error) {
	var o minio.GetObjectOptions
	err := o.SetRange(off, off+int64(most)-1)
	if err == nil && etag != "" {
		err = o.SetMatchETag(etag)
	}
	if err != nil {
		return nil, version{}, err
	}
	s := &stream{client: c}
	s.ctx, s.stop = context.WithCancel(ctx)
	s.stall = time.AfterFunc(answerLimit, s.stop)
	var info minio.ObjectInfo
	var header http.Header
	if s.body, info, header, err = c.core.GetObject(s.ctx, c.bucket, key, o); err != nil {
		defer s.stop()
		return nil, version{}, stalled(s.ctx, err)
	}
	v := versionOf(&info)
	if s.left, err = ranged(header, off, most, &v); err != nil {
		s.close()
		return nil, version{}, err
	}
	s.stall.Stop()
	return s, v, nil
}

// read fills p, or reads the rest if p is larger.
func (s *stream) read(p []byte) (n int, err error) {
	defer s.stall.Stop()
	for most := min(len(p), s.left); n < most && err == nil; {
		s.stall.Reset(answerLimit)
		var m int
		m, err = s.body.Read(p[n:most])
		n += m
		if err == io.EOF && n < most {
			err = io.ErrUnexpectedEOF
		}
	}
	s.left -= n
	s.client.read.Add(uint64(n))
	if err == io.EOF {
		err = nil
	}
	return n, stalled(s.ctx, err)
}

// close ends the stream. The connection is reused if the whole body was read.
func (s *stream) close() {
	if s.left == 0 {
		_, _ = s.body.Read(make([]byte, 1)) // the end of the body
	}
	s.stall.Stop()
	_ = s.body.Close()
	s.stop()
}

// stalled returns the error of a request, which is an error of its own if no byte arrived in time.
func stalled(ctx context.Context, err error) error {
	if err != nil && ctx.Err() != nil {
		return fmt.Errorf("no byte in %s: %w", answerLimit, context.DeadlineExceeded)
	}
	return err
}

// ranged checks that an answer has the requested range, and returns the number of bytes in it.
func ranged(h http.Header, off int64, most int, v *version) (int, error) {
	text := h.Get("Content-Range")
	var first, last, size int64
	if n, _ := fmt.Sscanf(text, "bytes %d-%d/%d", &first, &last, &size); n != 3 || first != off || last < first ||
		last != min(off+int64(most), size)-1 {
		return 0, fmt.Errorf("%w: range %q, want %d bytes from %d", ErrAnswer, text, most, off)
	}
	v.size = size
	return int(last - first + 1), nil
}

// condition is a condition for writing an object.
type condition struct {
	absent bool   // the object does not exist
	etag   string // the object has this version
}

func (w condition) options(id uint64) minio.PutObjectOptions {
	o := minio.PutObjectOptions{
		DisableContentSha256: true, // pieces have their own checksums
		ContentType:          "application/octet-stream",
		UserMetadata:         map[string]string{idMeta: strconv.FormatUint(id, 16)},
	}
	if w.absent {
		o.SetMatchETagExcept("*")
	}
	if w.etag != "" {
		o.SetMatchETag(w.etag)
	}
	return o
}

// body is the data that an attempt sends. A transport may continue to read it after the attempt, and must not see other bytes
// in the same buffer.
type body struct {
	mu   sync.Mutex
	left []byte
}

func newBody(b []byte) *body { return &body{left: b} }

// Read implements [io.Reader].
func (b *body) Read(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.left) == 0 {
		return 0, io.EOF
	}
	n := copy(p, b.left)
	b.left = b.left[n:]
	return n, nil
}

func (b *body) end() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.left = nil
}

// put writes an object, with the number of its file, and returns its ETag.
func (c *client) put(key string, id uint64, data []byte, when condition) (etag string, err error) {
	tried := false
	err = c.doOn(key, Put, len(data), func(ctx context.Context) error {
		body := newBody(data)
		defer body.end()
		info, err := c.core.PutObject(ctx, c.bucket, key, body, int64(len(data)), "", "", when.options(id))
		if etag = strong(info.ETag); err != nil {
			etag, err = c.settled(key, id, tried, err)
		}
		tried = true
		return err
	})
	if err == nil {
		c.written.Add(uint64(len(data)))
	}
	return etag, err
}

// settled decides about a write that the server refused although an earlier attempt without an answer may have taken effect. If
// the object has the file's number, that attempt did.
func (c *client) settled(key string, id uint64, tried bool, err error) (etag string, _ error) {
	code := minio.ToErrorResponse(err)
	if !tried || code.StatusCode != http.StatusPreconditionFailed && code.Code != "NoSuchUpload" {
		return "", err
	}
	if v, look := c.head(key); look == nil && v.id == id {
		return v.etag, nil
	}
	return "", err
}

func (c *client) start(key string, id uint64) (upload string, err error) {
	err = c.doOn(key, Part, 0, func(ctx context.Context) error {
		upload, err = c.core.NewMultipartUpload(ctx, c.bucket, key, condition{}.options(id))
		return err
	})
	return upload, err
}

func (c *client) part(key, upload string, number int, data []byte) (p minio.CompletePart, err error) {
	err = c.doOn(key, Part, len(data), func(ctx context.Context) error {
		body := newBody(data)
		defer body.end()
		part, err := c.core.PutObjectPart(ctx, c.bucket, key, upload, number, body, int64(len(data)),
			minio.PutObjectPartOptions{DisableContentSha256: true})
		p = minio.CompletePart{PartNumber: number, ETag: part.ETag}
		return err
	})
	if err == nil {
		c.written.Add(uint64(len(data)))
	}
	return p, err
}

// complete joins parts to an object.
func (c *client) complete(key, upload string, id uint64, parts []minio.CompletePart, when condition) (etag string, err error) {
	tried := false
	err = c.doOn(key, Part, joining, func(ctx context.Context) error {
		o := when.options(id)
		o.UserMetadata, o.ContentType = nil, ""
		info, err := c.core.CompleteMultipartUpload(ctx, c.bucket, key, upload, parts, o)
		if etag = strong(info.ETag); err != nil {
			etag, err = c.settled(key, id, tried, err)
		}
		tried = true
		return err
	})
	return etag, err
}

// abort cancels a multipart upload.
func (c *client) abort(key, upload string) error {
	err := c.do(Delete, 0, func(ctx context.Context) error {
		return c.core.AbortMultipartUpload(ctx, c.bucket, key, upload)
	})
	if minio.ToErrorResponse(err).StatusCode == http.StatusNotFound {
		return nil
	}
	return err
}

// uploads calls found for the multipart uploads of keys with a prefix.
func (c *client) uploads(prefix string, found func(key, upload string)) error {
	var key, id string
	for pages := (pages{}); ; {
		var page minio.ListMultipartUploadsResult
		err := c.do(List, 0, func(ctx context.Context) (err error) {
			page, err = c.core.ListMultipartUploads(ctx, c.bucket, prefix, key, id, "", 1000)
			return err
		})
		if err != nil {
			return err
		}
		for _, u := range page.Uploads {
			found(u.Key, u.UploadID)
		}
		if !page.IsTruncated || page.NextKeyMarker == "" {
			return nil
		}
		if key, id = page.NextKeyMarker, page.NextUploadIDMarker; pages.repeat(key+"\x00"+id, len(page.Uploads)) {
			return fmt.Errorf("%w: a list of uploads that comes to no end", ErrAnswer)
		}
	}
}

// copy copies an object with its metadata.
func (c *client) copy(from, etag, to string) error {
	return c.doOn(to, Copy, joining, func(ctx context.Context) error {
		_, err := c.core.CopyObject(ctx, c.bucket, from, c.bucket, to, nil,
			minio.CopySrcOptions{Bucket: c.bucket, Object: from, MatchETag: etag}, minio.PutObjectOptions{})
		return err
	})
}

// remove removes an object. A missing object is not an error.
func (c *client) remove(key string) error {
	return c.doOn(key, Delete, 0, func(ctx context.Context) error {
		return c.core.RemoveObject(ctx, c.bucket, key, minio.RemoveObjectOptions{})
	})
}

// list calls found for the objects below a prefix, in order. With a delimiter, it calls found for common prefixes instead of the objects
// below them.
func (c *client) list(ctx context.Context, prefix, delimiter string, found func(o *minio.ObjectInfo, isPrefix bool)) error {
	var pages pages
	for token := ""; ; {
		var page minio.ListBucketV2Result
		err := c.do(List, 0, func(context.Context) (err error) {
			page, err = c.core.ListObjectsV2(c.bucket, prefix, "", token, delimiter, 1000)
			return err
		})
		if err = errors.Join(err, ctx.Err()); err != nil {
			return err
		}
		for i := range page.Contents {
			if o := &page.Contents[i]; !strings.HasPrefix(o.Key, prefix) || o.Size < 0 {
				return fmt.Errorf("%w: a list of %q has %q with %d bytes", ErrAnswer, prefix, o.Key, o.Size)
			}
			found(&page.Contents[i], false)
		}
		for _, p := range page.CommonPrefixes {
			if !strings.HasPrefix(p.Prefix, prefix) {
				return fmt.Errorf("%w: a list of %q has %q", ErrAnswer, prefix, p.Prefix)
			}
			found(&minio.ObjectInfo{Key: strings.TrimSuffix(p.Prefix, "/")}, true)
		}
		if !page.IsTruncated || page.NextContinuationToken == "" {
			return nil
		}
		if token = page.NextContinuationToken; pages.repeat(token, len(page.Contents)+len(page.CommonPrefixes)) {
			return fmt.Errorf("%w: a list of %q that comes to no end", ErrAnswer, prefix)
		}
	}
}

// pages detects a list that never ends because its continuation tokens repeat. It uses Brent's algorithm: one token is kept and
// compared with the following ones, and it is replaced after twice as many pages.
type pages struct {
	kept              string
	since, most, none int
}

// mostEmpty is the number of empty pages in a row that is tolerated. Servers skip deleted objects, so some pages are empty.
const mostEmpty = 1000

// repeat reports whether the list never ends, given the token of the next page and the number of entries of this one.
func (p *pages) repeat(mark string, entries int) bool {
	if p.none++; entries > 0 {
		p.none = 0
	}
	if mark == p.kept || p.none >= mostEmpty {
		return true
	}
	if p.since++; p.since >= p.most {
		p.kept, p.since, p.most = mark, 0, 2*p.most+1
	}
	return false
}

// isCode reports whether an error is an answer with a status.
func isCode(err error, status int) bool {
	return err != nil && minio.ToErrorResponse(err).StatusCode == status && !errors.Is(err, ErrAnswer)
}
