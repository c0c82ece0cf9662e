package s3fs

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/testkit/faultfs"
	"github.com/kvhost/kvhost/host/internal/testkit/s3double"
	"github.com/kvhost/kvhost/staging"
	"golang.org/x/sys/unix"
)

const top = "s3://bucket/some/prefix"

// patient is the term of a lock that is to stand: a busy machine is slow.
const patient = 4 * time.Second

// open makes the file system of a server, as one host of it. Temporaries are what ends in .tmp.
func open(t *testing.T, url string) *FS {
	t.Helper()
	t.Setenv("AWS_ACCESS_KEY_ID", "key")
	t.Setenv("AWS_SECRET_ACCESS_KEY", "secret")
	f, err := Open(Config{Path: top, Endpoint: url, PathStyle: true, Holder: t.Name(), Term: 400 * time.Millisecond,
		Target: func(temp string) (string, bool) { return strings.CutSuffix(temp, ".tmp") }})
	must(t, err)
	t.Cleanup(func() { _ = f.Close() })
	return f
}

var must = testenv.OK

func create(t *testing.T, f *FS, name string, data []byte) {
	t.Helper()
	w, err := f.OpenFile(top+"/"+name, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	must(t, err)
	_, err = w.WriteAt(data, 0)
	must(t, err)
	must(t, w.Close())
}

func put(t *testing.T, f *FS, name string, data []byte) {
	t.Helper()
	create(t, f, name+".tmp", data)
	must(t, f.Rename(top+"/"+name+".tmp", top+"/"+name))
}

func bytesOf(t *testing.T, f *FS, name string) []byte {
	t.Helper()
	r, err := f.OpenFile(top+"/"+name, os.O_RDONLY, 0)
	must(t, err)
	defer r.Close()
	info, err := r.Stat()
	must(t, err)
	b := make([]byte, info.Size)
	if _, err := r.ReadAt(b, 0); err != io.EOF {
		must(t, err)
	}
	return b
}

// TestSuite leaves out what a bucket has not: directories that are there or are not, links, blocks, a size, other errors of names.
func TestSuite(t *testing.T) {
	faultfs.RunSuite(t, open(t, s3double.Start(t).URL), top, "errno", "rename without replacing", "link and remove", "directories",
		"stat", "sync", "space", "lock", "one winner", "direct")
}

// TestOneWinner: of hosts that publish under one name at the same time, one does.
func TestOneWinner(t *testing.T) {
	f := open(t, s3double.Start(t).URL)
	var wg sync.WaitGroup
	won := make(chan byte, 8)
	for i := range byte(8) {
		temp := fmt.Sprintf("%s/%d.tmp", top, i)
		create(t, f, temp[len(top)+1:], []byte{i})
		wg.Go(func() {
			switch err := f.RenameNoReplace(temp, top+"/a"); {
			case err == nil:
				won <- i
			case !errors.Is(err, fs.ErrExist):
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if close(won); len(won) != 1 || bytesOf(t, f, "a")[0] != <-won {
		t.Errorf("%d of 8 have published, or another one's content is there, want one", len(won))
	}
}

// TestParts: a file longer than a part is one object after its publication and nothing before, its first bytes being written last.
// One that is given up leaves nothing.
func TestParts(t *testing.T) {
	s := s3double.Start(t)
	f := open(t, s.URL)
	f.cfg.Part = 5 << 20
	want := make([]byte, 17<<20+12345)
	rand.NewChaCha8([32]byte{1}).Read(want)
	for _, publish := range []bool{true, false} {
		name := fmt.Sprintf("%s/dir/file-%v", top, publish)
		w, err := f.OpenFile(name+".tmp", os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
		must(t, err)
		const head = 4096
		for at := head; at < len(want); {
			n := min(1<<20+4096, len(want)-at)
			_, err = w.WriteAt(want[at:at+n], int64(at))
			must(t, err)
			at += n
		}
		_, err = w.WriteAt(want[:head], 0)
		must(t, err)
		info, err := w.Stat()
		must(t, err)
		must(t, errors.Join(w.Datasync(), w.Close()))
		if before := len(s.Objects()); len(s.Uploads()) != 1 || publish && before != 0 || info.Size != int64(len(want)) {
			t.Fatalf("before its publication: %d objects, uploads %v, size %d; want none, one and %d", before, s.Uploads(), info.Size, len(want))
		}
		if !publish {
			must(t, f.Remove(name+".tmp"))
			if n := len(s.Objects()); n != 1 || len(s.Uploads()) != 0 {
				t.Errorf("after a file was given up: %d objects, uploads %v, want the one that was published", n, s.Uploads())
			}
			continue
		}
		must(t, f.RenameNoReplace(name+".tmp", name))
		if got := s.Objects()["some/prefix/dir/file-true"].Body; !bytes.Equal(got, want) || len(s.Uploads()) != 0 {
			t.Fatalf("the object has %d bytes, or other ones than %d; uploads %v", len(got), len(want), s.Uploads())
		}
		if now, err := f.Stat(name); err != nil || !now.Same(info) || now.Size != info.Size {
			t.Errorf("published: %+v, error %v, want %+v", now, err, info)
		}
		if !bytes.Equal(bytesOf(t, f, "dir/file-true"), want) {
			t.Error("read other bytes than were written")
		}
	}
	put(t, f, "taken", []byte("there"))
	create(t, f, "a.tmp", []byte("mine"))
	if err := f.RenameNoReplace(top+"/a.tmp", top+"/taken"); !errors.Is(err, fs.ErrExist) || string(bytesOf(t, f, "taken")) != "there" {
		t.Errorf("publishing under a name that is taken: %v, want %v and the object as it was", err, fs.ErrExist)
	}
	_, err := f.OpenFile(top+"/none", os.O_RDONLY, 0)
	if !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("opening what is not there: %v, want %v", err, fs.ErrNotExist)
	}
}

// TestRequests: what a piece costs.
func TestRequests(t *testing.T) {
	s := s3double.Start(t)
	f := open(t, s.URL)
	create(t, f, "a.tmp", make([]byte, 1<<20))
	must(t, f.RenameNoReplace(top+"/a.tmp", top+"/a"))
	r, err := f.OpenFile(top+"/a", os.O_RDONLY, 0)
	must(t, err)
	_, err = r.Stat()
	must(t, err)
	_, err = r.ReadAt(make([]byte, 1<<20), 0)
	must(t, errors.Join(err, r.Close(), f.Remove(top+"/a")))
	put(t, f, "b", make([]byte, 1<<20)) // opened as the last one was read
	if !bytes.Equal(bytesOf(t, f, "b"), make([]byte, 1<<20)) {
		t.Error("read other bytes than were written")
	}
	got := fmt.Sprint(f.Stats().Requests)
	if want := "map[get:3 head:0 put:2 part:0 copy:0 list:0 delete:1]"; got != want {
		t.Errorf("requests for two stores, two loads and an eviction: %s, want %s", got, want)
	}
}

// TestVersions: a file that is open is one version of its object.
func TestVersions(t *testing.T) {
	s := s3double.Start(t)
	f := open(t, s.URL)
	put(t, f, "a", bytes.Repeat([]byte("1"), 200<<10))
	r, err := f.OpenFile(top+"/a", os.O_RDONLY, 0)
	must(t, err)
	s.Set("some/prefix/a", bytes.Repeat([]byte("2"), 200<<10))
	if n, err := r.ReadAt(make([]byte, 200<<10), 0); !errors.Is(err, unix.ESTALE) {
		t.Errorf("reading an object that was replaced: %d bytes, error %v, want %v", n, err, unix.ESTALE)
	}
	s.Set("some/prefix/a", nil)
	if _, err := r.ReadAt(make([]byte, 100), 100<<10); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("reading an object that was removed: %v, want %v", err, fs.ErrNotExist)
	}
}

// TestFaults: what passes is not seen, and what stays has the errno of whom it blames. A write that has taken effect although there
// was no answer is no failure.
func TestFaults(t *testing.T) {
	s := s3double.Start(t)
	p := s3double.StartProxy(t, s.URL)
	f := open(t, p.URL)
	data := bytes.Repeat([]byte("kvhost"), 50<<10)
	for i, fault := range []s3double.Fault{s3double.Busy, s3double.TooMany, s3double.Broken, s3double.Reset, s3double.ResetLate, s3double.Half} {
		name := fmt.Sprintf("%s/passes-%d", top, i)
		p.Set(s3double.Rule{Fault: fault, Times: 1})
		create(t, f, name[len(top)+1:]+".tmp", data)
		if err := f.RenameNoReplace(name+".tmp", name); err != nil || p.Injected() != 1 {
			t.Errorf("%s once, storing: error %v, %d faults, want none and 1", fault, err, p.Injected())
		}
		p.Set(s3double.Rule{Fault: fault, Times: 1, After: 1})
		f.first.Store(0) // so that there is a second request
		if got := bytesOf(t, f, name[len(top)+1:]); !bytes.Equal(got, data) || p.Injected() != 1 {
			t.Errorf("%s once, loading: %d bytes or others, %d faults, want %d and 1", fault, len(got), p.Injected(), len(data))
		}
	}
	for _, c := range []struct {
		fault         s3double.Fault
		load, publish unix.Errno
	}{
		{s3double.Expired, unix.ENOTCONN, unix.ENOTCONN},
		{s3double.Denied, unix.EACCES, unix.EROFS},
	} {
		create(t, f, "b.tmp", data)
		p.Set(s3double.Rule{Fault: c.fault})
		if _, err := f.OpenFile(top+"/passes-0", os.O_RDONLY, 0); !errors.Is(err, c.load) {
			t.Errorf("%s, loading: %v, want %v", c.fault, err, c.load)
		}
		if err := f.RenameNoReplace(top+"/b.tmp", top+"/b"); !errors.Is(err, c.publish) {
			t.Errorf("%s, storing: %v, want %v", c.fault, err, c.publish)
		}
		p.Set()
		must(t, f.Remove(top+"/b.tmp"))
	}
}

// TestOutage: once a request has failed with all its attempts, others fail without one for a moment. One that succeeds ends that.
func TestOutage(t *testing.T) {
	s := s3double.Start(t)
	p := s3double.StartProxy(t, s.URL)
	f := open(t, p.URL)
	put(t, f, "a", []byte("a"))
	f.budget = 0 // what one attempt takes
	p.Set(s3double.Rule{Fault: s3double.TooMany})
	_, first := f.Stat(top + "/a") // the last attempt may be at the end of the time, or not be over by then
	if !errors.Is(first, unix.EIO) && !errors.Is(first, unix.ETIMEDOUT) || p.Injected() < 2 {
		t.Errorf("a server that is too busy: %v after %d attempts, want %v or %v after some", first, p.Injected(), unix.EIO, unix.ETIMEDOUT)
	}
	tried := p.Injected()
	if _, err := f.Stat(top + "/a"); err == nil || err.Error() != first.Error() || p.Injected() != tried {
		t.Errorf("the next request: %v after %d attempts, want %v after none", err, p.Injected()-tried, first)
	}
	p.Set()
	testenv.Until(t, "an answer of a server that is back", func() bool {
		_, err := f.Stat(top + "/a")
		return err == nil
	})
	if f.outage.Load() != nil {
		t.Error("the outage goes on after a request has succeeded")
	}
}

// TestLock: one host at a time; a lock that is not given back lapses, and who had it writes nothing any more.
func TestLock(t *testing.T) {
	s := s3double.Start(t)
	name := top + "/.kvhost/lock"
	for _, s.Unconditional = range []bool{false, true} {
		a, b := open(t, s.URL), open(t, s.URL)
		a.cfg.Term = patient
		held, err := a.Lock(name)
		must(t, err)
		if _, err := b.Lock(name); !errors.Is(err, staging.ErrLocked) || !strings.Contains(err.Error(), t.Name()) {
			t.Errorf("conditional %v: the second host: %v, want %v and who has it", !s.Unconditional, err, staging.ErrLocked)
		}
		if got := a.conditional(); got == s.Unconditional {
			t.Errorf("conditional writes: %v, want %v", got, !s.Unconditional)
		}
		must(t, held.Close())
		held, err = b.Lock(name)
		must(t, err)
		must(t, held.Close())
	}
	s.Unconditional = false
	p := s3double.StartProxy(t, s.URL)
	a, b := open(t, p.URL), open(t, s.URL)
	_, err := a.Lock(name)
	must(t, err)
	create(t, a, "x.tmp", []byte("x"))
	p.Set(s3double.Rule{Fault: s3double.Busy, Method: "PUT"})
	held, err := b.Lock(name)
	must(t, err)
	if err := a.RenameNoReplace(top+"/x.tmp", top+"/x"); !errors.Is(err, ErrLapsed) {
		t.Errorf("a store of a host whose lock has lapsed: %v, want %v", err, ErrLapsed)
	}
	if err := a.Remove(top + "/y"); !errors.Is(err, ErrLapsed) {
		t.Errorf("a removal by a host whose lock has lapsed: %v, want %v", err, ErrLapsed)
	}
	must(t, held.Close())
}

// TestRenewalWithoutAnAnswer: a renewal that took effect, and was answered to no attempt, does not cost the lock.
func TestRenewalWithoutAnAnswer(t *testing.T) {
	s := s3double.Start(t)
	p := s3double.StartProxy(t, s.URL)
	f := open(t, p.URL)
	f.free.budget = 0 // what one attempt takes
	name := top + "/.kvhost/lock"
	held, err := f.Lock(name)
	must(t, err)
	p.Set(s3double.Rule{Fault: s3double.ResetLate, Method: "PUT"})
	testenv.Until(t, "an outage", func() bool { return f.free.outage.Load() != nil })
	p.Set()
	testenv.Until(t, "the end of the outage", func() bool {
		_, err := f.Stat(name)
		if errors.Is(err, fs.ErrNotExist) {
			t.Fatalf("the lock is lost: %v", err)
		}
		return err == nil && f.free.outage.Load() == nil
	})
	must(t, held.Close())
}

// TestNoBucket: a bucket that is not there is no place for a lock.
func TestNoBucket(t *testing.T) {
	f := open(t, s3double.Start(t).URL)
	f.free.bucket = "another"
	if _, err := f.Lock(top + "/.kvhost/lock"); !errors.Is(err, unix.ENODEV) {
		t.Errorf("the lock in a bucket that is not there: %v, want %v", err, unix.ENODEV)
	}
}

// TestWaysToServers: the bucket is in the name of the host, or in the path; certificates are of a file, where one is named.
func TestWaysToServers(t *testing.T) {
	s, certificate := s3double.StartTLS(t)
	at := strings.TrimPrefix(s.URL, "https://")
	t.Setenv("AWS_ACCESS_KEY_ID", "key")
	t.Setenv("AWS_SECRET_ACCESS_KEY", "secret")
	for _, c := range []struct {
		endpoint, ca string
		path, works  bool
	}{
		{s.URL, certificate, true, true},
		{s.URL, "", true, false},
		{"https://example.com", certificate, true, true},
		{"https://example.com", certificate, false, true},
		{s3double.Start(t).URL, "", true, true},
	} {
		f, err := Open(Config{Path: top, Endpoint: c.endpoint, CAFile: c.ca, PathStyle: c.path})
		must(t, err)
		var asked string
		if strings.Contains(c.endpoint, "example.com") {
			f.transport.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
				asked = addr
				return new(net.Dialer).DialContext(ctx, network, at)
			}
		}
		f.budget = 0
		if _, err := f.Stat(top + "/none"); errors.Is(err, fs.ErrNotExist) != c.works {
			t.Errorf("%+v: got %v, want an answer: %v", c, err, c.works)
		}
		if want := map[bool]string{true: "example.com:443", false: "bucket.example.com:443"}[c.path]; asked != "" && asked != want {
			t.Errorf("%+v: %s was asked, want %s", c, asked, want)
		}
		must(t, f.Close())
	}
}

// TestUploadsOfEarlierHosts end when the next host takes the lock.
func TestUploadsOfEarlierHosts(t *testing.T) {
	s := s3double.Start(t)
	f := open(t, s.URL)
	f.cfg.Part = 5 << 20
	w, err := f.OpenFile(top+"/a.tmp", os.O_RDWR|os.O_CREATE, 0o600)
	must(t, err)
	_, err = w.WriteAt(make([]byte, 11<<20), 0)
	must(t, err)
	if got := s.Uploads(); len(got) != 1 {
		t.Fatalf("uploads %v, want one", got)
	}
	held, err := open(t, s.URL).Lock(top + "/.kvhost/lock")
	must(t, err)
	defer held.Close()
	if got := s.Uploads(); len(got) != 0 {
		t.Errorf("uploads %v of a host that is gone, want none", got)
	}
}

// TestServers: the double and a real server answer alike.
func TestServers(t *testing.T) {
	for name, start := range map[string]func(testing.TB) string{
		"double": func(t testing.TB) string { return s3double.Start(t).URL }, "versitygw": s3double.StartReal,
	} {
		t.Run(name, func(t *testing.T) {
			url := start(t)
			f := open(t, url)
			f.cfg.Term = patient
			if got := f.Try(); len(got.Failed) > 0 || !got.Conditional || len(got.Read) != len(TrialSizes) {
				t.Errorf("a trial finds %+v, want conditional writes, speeds and no failure", got)
			}
			held, err := f.Lock(top + "/.kvhost/lock")
			must(t, err)
			if _, err := open(t, url).Lock(top + "/.kvhost/lock"); !errors.Is(err, staging.ErrLocked) {
				t.Errorf("a second host takes the lock: %v, want %v", err, staging.ErrLocked)
			}
			f.cfg.Part = 5 << 20
			data := make([]byte, 12<<20+12345)
			rand.NewChaCha8([32]byte{1}).Read(data)
			for file, n := range map[string]int{"empty": 0, "one": 1 << 20, "dir/parts": len(data)} {
				put(t, f, file, data[:n])
				if !bytes.Equal(bytesOf(t, f, file), data[:n]) {
					t.Errorf("%s: read other bytes than were written", file)
				}
				create(t, f, file+".tmp", data)
				if err := f.RenameNoReplace(top+"/"+file+".tmp", top+"/"+file); !errors.Is(err, fs.ErrExist) {
					t.Errorf("%s is published twice: %v, want %v", file, err, fs.ErrExist)
				}
				must(t, f.Remove(top+"/"+file+".tmp"))
			}
			must(t, f.uploads(f.prefix, func(key, upload string) { t.Errorf("an upload of %s is left", key) }))
			must(t, f.Rename(top+"/dir/parts", top+"/moved"))
			list, err := f.ReadDir(top)
			must(t, err)
			var names []string
			for _, e := range list {
				names = append(names, e.Name())
			}
			if got, want := fmt.Sprint(names), "[.kvhost empty moved one]"; got != want {
				t.Errorf("listed %s, want %s", got, want)
			}
			must(t, errors.Join(f.Remove(top+"/moved"), f.Remove(top+"/never there")))
			if _, err := f.Stat(top + "/moved"); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("a removed object: %v, want %v", err, fs.ErrNotExist)
			}
			must(t, held.Close())
		})
	}
}

// TestControl: the small objects of hosts that share a bucket are written in the place of one version.
func TestControl(t *testing.T) {
	s := s3double.Start(t)
	c := open(t, s.URL).Control(top+"/.kvhost/shared", time.Second)
	first, err := c.Put("hosts/a", []byte("1"), "")
	must(t, err)
	if _, err := c.Put("hosts/a", []byte("2"), ""); !errors.Is(err, fs.ErrExist) {
		t.Errorf("made where one is: %v, want %v", err, fs.ErrExist)
	}
	second, err := c.Put("hosts/a", []byte("2"), first)
	must(t, err)
	if _, err := c.Put("hosts/a", []byte("3"), first); !errors.Is(err, fs.ErrExist) {
		t.Errorf("written over another version: %v, want %v", err, fs.ErrExist)
	}
	if _, err := c.Put("hosts/b", []byte("1"), first); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("written over what is not there: %v, want %v", err, fs.ErrNotExist)
	}
	for known, want := range map[string]string{"": "2", first: "2", second: ""} {
		if data, at, err := c.Get("hosts/a", known, 1<<20); err != nil || string(data) != want || at != second {
			t.Errorf("with version %q known: %q of version %s, %v, want %q of %s", known, data, at, err, want, second)
		}
	}
	if list, err := c.List("hosts"); err != nil || len(list) != 1 || list["a"] != second {
		t.Errorf("the list is %v, %v, want a of version %s", list, err, second)
	}
	must(t, c.Remove("hosts/a"))
	if _, _, err := c.Get("hosts/a", "", 1<<20); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("what was removed is read: %v", err)
	}
}

// TestSharedNeedsConditions: a bucket is not shared where the server does not heed conditions, and no lock stays there.
func TestSharedNeedsConditions(t *testing.T) {
	s := s3double.Start(t)
	s.Unconditional = true
	f := open(t, s.URL)
	f.cfg.Shared = true
	if _, err := f.Lock(top + "/.kvhost/lock.a"); !errors.Is(err, ErrConditions) {
		t.Errorf("the lock of a host: %v, want %v", err, ErrConditions)
	}
	if left := s.Objects(); len(left) > 0 {
		t.Errorf("%d objects are left, want none", len(left))
	}
}

// TestWriteWhile: a host that may not write makes no request, and does not say that it made none when it did.
func TestWriteWhile(t *testing.T) {
	s := s3double.Start(t)
	p := s3double.StartProxy(t, s.URL)
	f := open(t, p.URL)
	f.cfg.Shared = true
	asked, most := 0, 0
	f.WriteWhile(func() bool { asked++; return asked <= most })
	publish := func(name string) error {
		asked = 0
		create(t, f, name+".tmp", []byte("text"))
		return f.RenameNoReplace(top+"/"+name+".tmp", top+"/"+name)
	}
	if err := publish("x"); !errors.Is(err, unix.EAGAIN) || s.Count("PUT") != 0 {
		t.Errorf("publishing: %v and %d requests, want %v and none", err, s.Count("PUT"), unix.EAGAIN)
	}
	most = 2 // by the file system, and before the first attempt
	p.Set(s3double.Rule{Fault: s3double.ResetLate, Method: "PUT"})
	if err := publish("y"); err == nil || errors.Is(err, unix.EAGAIN) || s.Count("PUT") != 1 {
		t.Errorf("publishing, of which one attempt was allowed: %v and %d requests, want another error than %v and one", err,
			s.Count("PUT"), unix.EAGAIN)
	}
}

// TestListsOfALiar: a list that comes to no end, or has what it cannot have, fails at once.
func TestListsOfALiar(t *testing.T) {
	s := s3double.Start(t)
	p := s3double.StartProxy(t, s.URL)
	f := open(t, p.URL)
	put(t, f, "a", []byte("a"))
	for _, fault := range []s3double.Fault{s3double.SameToken, s3double.Foreign, s3double.Negative} {
		p.Set(s3double.Rule{Fault: fault, In: "list-type"})
		ctx, end := context.WithCancel(t.Context())
		found := 0
		err := f.List(ctx, top, func(string, int64, time.Time) {
			if found++; found == 100 {
				end()
			}
		})
		if !errors.Is(err, ErrAnswer) || found > 2 {
			t.Errorf("%s: got %v after %d names, want %v after at most 2", fault, err, found, ErrAnswer)
		}
		end()
	}
}

// TestPagesThatRepeat are found out whatever their period, and never where none repeats.
func TestPagesThatRepeat(t *testing.T) {
	for period := 1; period < 40; period++ {
		var p pages
		n := 0
		for mark := 0; !p.repeat(string(rune('a'+mark%period)), 1); mark++ {
			n++
		}
		if n > 4*period {
			t.Errorf("marks with a period of %d: found out after %d pages, want at most %d", period, n, 4*period)
		}
	}
	var p pages
	for mark := range 100_000 {
		if p.repeat(string(rune(mark+1)), mark%2) {
			t.Fatalf("page %d of a list without a repetition is taken for one", mark)
		}
	}
	for i := range mostEmpty - 1 {
		if p.repeat("empty"+string(rune(i)), 0) && i < mostEmpty-2 {
			t.Fatalf("page %d of those without an entry is the last, want %d", i, mostEmpty)
		}
	}
}

// TestPrefixesThatAreMisread: what servers make another key of is refused.
func TestPrefixesThatAreMisread(t *testing.T) {
	t.Setenv("AWS_ACCESS_KEY_ID", "key")
	for prefix, want := range map[string]bool{
		"": true, "/": true, "x": true, "/x": true, "x/": true, "x/y": true, "x.y/..z/.a": true,
		"/./x": false, "./x": false, "x//y": false, "../x": false, "x/..": false, "x/.": false, "a/b/./c": false, "a\nb": false, "a/\x7f": false,
	} {
		_, err := Open(Config{Path: "s3://bucket/" + prefix})
		var refused *ConfigError
		if errors.As(err, &refused) == want || (err == nil) != want {
			t.Errorf("the prefix %q: got %v, want it taken: %t", prefix, err, want)
		}
	}
}

// TestAnswersWithoutEnd: of an answer that comes to no end, little is read, and little is said of it.
func TestAnswersWithoutEnd(t *testing.T) {
	for what, answer := range map[string]func(w http.ResponseWriter){
		"a list":  func(w http.ResponseWriter) { _, _ = io.WriteString(w, "<ListBucketResult><Contents><Key>") },
		"lists":   func(w http.ResponseWriter) { _, _ = io.WriteString(w, "<ListBucketResult>") },
		"headers": func(w http.ResponseWriter) { w.Header().Set("X", strings.Repeat("x", 1<<20)) },
		"an error": func(w http.ResponseWriter) {
			w.WriteHeader(http.StatusBadRequest)
			_, _ = io.WriteString(w, "<Error><Code>Bad</Code><Message>"+strings.Repeat("x", 1<<19)+"</Message></Error>")
		},
	} {
		t.Run(what, func(t *testing.T) {
			part := bytes.Repeat([]byte("<Contents/>"), 1<<10)
			if what == "a list" {
				part = bytes.Repeat([]byte("x"), 1<<14)
			}
			var sent atomic.Int64
			s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				answer(w)
				for what != "an error" && sent.Load() < 1<<30 {
					n, err := w.Write(part)
					if sent.Add(int64(n)); err != nil {
						return
					}
				}
			}))
			defer s.Close()
			t.Setenv("AWS_ACCESS_KEY_ID", "key")
			t.Setenv("AWS_SECRET_ACCESS_KEY", "secret")
			f := &FS{prefix: "some/prefix/"}
			var err error
			f.client, err = newClient(&Config{Endpoint: s.URL, PathStyle: true, Budget: time.Second}, "bucket")
			must(t, err)
			f.client.answer = time.Second
			_, err = f.Control("c", time.Second).List("x")
			if err == nil || len(err.Error()) > 16<<10 {
				t.Errorf("%d bytes of error, want some, and few", len(fmt.Sprint(err)))
			}
			if n := sent.Load(); n > 64<<20 { // attempts take a few, and sockets hold some
				t.Errorf("%d bytes are sent, want that few are read", n)
			}
		})
	}
}
