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
	answerLimit  = 4 * time.Second // for the first byte, and between any two
	leastRate    = 1 << 20         // bytes per second of a body that is sent
	joining      = 8 << 20         // what a server that copies or joins bytes before it answers is given, in bytes that are sent
	outageRest   = time.Second
	outageLimit  = time.Second // in the place of answerLimit
	firstPause   = 50 * time.Millisecond
	longestPause = 2 * time.Second
)

// Request is a kind of request, as servers bill them.
type Request int

// The kinds of requests.
const (
	Get Request = iota
	Head
	Put
	Part // of a multipart upload, its start and its end
	Copy
	List
	Delete
	requests
)

func (r Request) String() string {
	return [...]string{"get", "head", "put", "part", "copy", "list", "delete"}[r]
}

// Stats are counted since the start.
type Stats struct {
	Requests      map[Request]uint64 // made
	Failed        map[Request]uint64 // of them: answered with an error, or not at all
	Read, Written uint64             // bytes of bodies
}

type client struct {
	core      *minio.Core
	bucket    string
	budget    time.Duration // see Config.Budget
	answer    time.Duration // for the first byte of an answer
	transport *http.Transport
	may       func(key string) error // why an object may not be written or removed now; nil: all may

	hedge hedge
	*counters
	outage atomic.Pointer[outage] // that the last answer, or its absence, told of; nil: none
}

// counters are those of all clients of a file system.
type counters struct {
	made, failed  [requests]atomic.Uint64
	read, written atomic.Uint64
}

// apart is a client of the same bucket that writes at any time, has patience of its own, and learns of outages by itself.
func (c *client) apart(budget, answer time.Duration) *client {
	return &client{core: c.core, bucket: c.bucket, budget: budget, answer: answer, transport: c.transport, counters: c.counters}
}

// outage is a request that has failed with all its attempts. For a moment others fail at once, so that who tries many objects
// because one has failed need not wait for each; then they have little time until one succeeds.
type outage struct {
	at  time.Time
	err error
}

// newClient makes the client of a configuration. It asks the server nothing.
func newClient(c *Config, bucket string) (*client, error) {
	endpoint := cmp.Or(c.Endpoint, "https://s3.amazonaws.com")
	u, err := url.Parse(endpoint)
	if err != nil || u.Host == "" || u.Path != "" && u.Path != "/" || u.Scheme != "http" && u.Scheme != "https" {
		return nil, refuse("endpoint", "%q, want https://host or http://host, with a port or without", endpoint)
	}
	transport := &http.Transport{
		Proxy: http.ProxyFromEnvironment, DialContext: (&net.Dialer{Timeout: dialLimit}).DialContext,
		TLSHandshakeTimeout: dialLimit, ExpectContinueTimeout: time.Second,
		MaxIdleConnsPerHost: 64, IdleConnTimeout: 30 * time.Second, DisableCompression: true,
		ReadBufferSize: 64 << 10, WriteBufferSize: 64 << 10,
	}
	if c.CAFile != "" {
		signers, err := regular.Renew(func() (*x509.CertPool, error) { return readSigners(c.CAFile) }, c.Log, c.CAFile)
		if err != nil {
			return nil, err
		}
		transport.TLSClientConfig = &tls.Config{
			InsecureSkipVerify: true, // VerifyConnection verifies, by the signers of the moment
			VerifyConnection:   func(s tls.ConnectionState) error { return verify(s, signers.Now()) },
		}
	}
	lookup := minio.BucketLookupDNS
	switch {
	case c.PathStyle:
		lookup = minio.BucketLookupPath
	case c.Endpoint == "":
		lookup = minio.BucketLookupAuto // by path where a certificate of AWS would not fit the bucket's name
	}
	made := &client{bucket: bucket, budget: c.Budget, answer: answerLimit, transport: transport, counters: &counters{}}
	made.core, err = minio.NewCore(u.Host, &minio.Options{
		// The order of the AWS SDKs: environment, profile, web identity, containers, instances.
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

// readSigners reads the certificates of who may sign the server's.
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

// verify is what crypto/tls does with signers that do not change.
func verify(s tls.ConnectionState, signers *x509.CertPool) error {
	o := x509.VerifyOptions{DNSName: s.ServerName, Roots: signers, Intermediates: x509.NewCertPool()}
	for _, c := range s.PeerCertificates[1:] {
		o.Intermediates.AddCert(c)
	}
	_, err := s.PeerCertificates[0].Verify(o)
	return err
}

// limited gives requests without a deadline one: the library lists without a context.
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
	return l.RoundTripper.RoundTrip(q)
}

func (c *client) Stats() Stats {
	s := Stats{Requests: map[Request]uint64{}, Failed: map[Request]uint64{}, Read: c.read.Load(), Written: c.written.Load()}
	for r := range requests {
		s.Failed[r] = c.failed[r].Load() // first, so that there are never more of them
		s.Requests[r] = c.made[r].Load()
	}
	return s
}

// answers is how long a request may take until its first byte.
func (c *client) answers() time.Duration {
	if c.outage.Load() != nil {
		return min(c.answer, outageLimit)
	}
	return c.answer
}

// do makes a request until it succeeds, fails for good, or the budget is used up. An attempt may take what the server has to
// begin its answer in, and what sending so many bytes takes.
func (c *client) do(kind Request, send int, once func(ctx context.Context) error) error {
	return c.doOn("", kind, send, once)
}

// doOn is do for a request that writes or removes an object, while that is allowed.
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
				return cmp.Or(err, no) // what an earlier attempt has done is not known
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

// version is an object as an answer tells of it.
type version struct {
	size     int64
	etag     string
	id       uint64 // that the object was stored with; else made of the ETag
	modified time.Time
}

// idMeta names the metadata with the number of the file that an object was made of: it tells, after a request without an
// answer, whether that has taken effect.
const idMeta = "Kvhost-File"

// strong is the ETag that a proxy has made a weak one of, with which no condition holds.
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

// head looks at an object.
func (c *client) head(key string) (v version, err error) {
	err = c.do(Head, 0, func(ctx context.Context) error {
		o, err := c.core.StatObject(ctx, c.bucket, key, minio.StatObjectOptions{})
		v = versionOf(&o)
		return err
	})
	return v, err
}

// get reads bytes of an object, of the version with an ETag if one is given. It reads less only at the object's end. When a
// body ends early the rest is asked for.
func (c *client) get(key, etag string, p []byte, off int64) (n int, v version, err error) {
	err = c.do(Get, len(p), func(ctx context.Context) error {
		s, at, err := c.begin(ctx, key, etag, off+int64(n), len(p)-n)
		if err != nil {
			return err
		}
		defer s.close()
		v, etag = at, at.etag // what is left is to be of the same version
		m, err := s.read(p[n:])
		n += m
		return err
	})
	return n, v, err
}

// open begins to read an object: its first bytes to head, and what follows of so many by the stream, if there is more.
func (c *client) open(key string, head []byte, most int) (n int, rest *stream, v version, err error) {
	err = c.do(Get, 0, func(ctx context.Context) (err error) {
		while, stop := context.WithCancel(context.Background())
		bound := context.AfterFunc(ctx, stop) // only until the first bytes are there
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

// stream is a body that is being read. It is given up where no byte comes for answerLimit.
type stream struct {
	client *client
	ctx    context.Context
	stop   func()
	stall  *time.Timer
	body   io.ReadCloser
	left   int
}

// ask asks for so many bytes of an object.
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

// read reads as many bytes as there are and p takes.
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

// close ends the stream. The connection is used again if all was read.
func (s *stream) close() {
	if s.left == 0 {
		_, _ = s.body.Read(make([]byte, 1)) // its end
	}
	s.stall.Stop()
	_ = s.body.Close()
	s.stop()
}

// stalled is the error of a request that was given up because no bytes came.
func stalled(ctx context.Context, err error) error {
	if err != nil && ctx.Err() != nil {
		return fmt.Errorf("no byte in %s: %w", answerLimit, context.DeadlineExceeded)
	}
	return err
}

// ranged checks that an answer is of the range that was asked for, and returns the bytes that it will have.
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

// condition is what must hold for an object to be written.
type condition struct {
	absent bool   // there is none
	etag   string // it is this version
}

func (w condition) options(id uint64) minio.PutObjectOptions {
	o := minio.PutObjectOptions{
		DisableContentSha256: true, // pieces have checksums of their own
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

// body is what an attempt sends. A transport may read on when the attempt is over, and then must not see other bytes that the
// buffer has.
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

// put writes an object of a file's number, and returns its ETag.
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

// settled ends a write that is refused although an earlier attempt without an answer may have taken effect: where the object
// has the file's number, it has.
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

// complete makes an object of parts.
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

// abort gives a multipart upload up.
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

// copy makes an object of another one, with its metadata.
func (c *client) copy(from, etag, to string) error {
	return c.doOn(to, Copy, joining, func(ctx context.Context) error {
		_, err := c.core.CopyObject(ctx, c.bucket, from, c.bucket, to, nil,
			minio.CopySrcOptions{Bucket: c.bucket, Object: from, MatchETag: etag}, minio.PutObjectOptions{})
		return err
	})
}

// remove removes an object. It is no error where there is none.
func (c *client) remove(key string) error {
	return c.doOn(key, Delete, 0, func(ctx context.Context) error {
		return c.core.RemoveObject(ctx, c.bucket, key, minio.RemoveObjectOptions{})
	})
}

// list calls found for the objects below a prefix, in order. With a delimiter it calls found for prefixes in the place of what is
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

// pages are those of a list so far. Marks of a next page that repeat, with whatever period, are found by Brent's way: one mark
// is kept, and another in its place after twice as many.
type pages struct {
	kept              string
	since, most, none int
}

// mostEmpty is how many pages in a row may have nothing: servers skip what was deleted.
const mostEmpty = 1000

// repeat says that the list comes to no end, by the mark of the next page and how many entries this one has.
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

// isCode says that a server has answered with a status.
func isCode(err error, status int) bool {
	return err != nil && minio.ToErrorResponse(err).StatusCode == status && !errors.Is(err, ErrAnswer)
}
