package shared

import (
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/host/internal/testkit/scheduler"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

// objects is a bucket in memory, and the scheduler of the hosts' threads. An operation is the half of a request, to where the server acts or to
// where the answer comes.
type objects struct {
	*scheduler.Scheduler
	objects map[string]*object
	version int
	faulty  bool // requests fail now and then, before the server acts or after it
	away    bool // all fail
	ids     uint64
	fault   error // what must hold and did not
	after   func(t *scheduler.Thread, verb, name string) error
	broken  func(t *scheduler.Thread, verb, name string) bool // requests that fail
	late    int64                                             // objects that were stored late
	owners  map[uint64]string                                 // by term
}

type object struct {
	data    []byte
	version string
	bytes   int64     // of a piece
	id      uint64    // of the file that it was made of
	stored  time.Time // to the second, as servers say it
	late    bool      // stored by a request that was under way for longer than the protocol waits
}

func newObjects(seed uint64) *objects {
	w := &objects{Scheduler: scheduler.New(seed, 37, 2*time.Millisecond), objects: map[string]*object{}, owners: map[uint64]string{}}
	w.after = w.holds
	return w
}

func (w *objects) join(n *node, c *Config) {
	n.files, c.Objects = pieces{n: n, w: w, temps: map[string]*staging.Info{}}, w
}

func (w *objects) path(k kv.Key) string { return fmt.Sprintf("p/%d", k[0]) }

func (w *objects) size(k kv.Key) (int64, bool) {
	if o := w.objects[w.path(k)]; o != nil {
		return o.bytes, true
	}
	return 0, false
}

func (w *objects) total() (sum int64) {
	for _, o := range w.objects {
		sum += o.bytes
	}
	return sum
}

func (w *objects) promises(*node) bool          { return false }
func (w *objects) fails(*scheduler.Thread) bool { return true }

// evictorNow is the evictor's object.
func (w *objects) evictorNow() (o evictor) {
	if have := w.objects[Dir+"/evictor"]; have != nil {
		_ = DecodeControl(have.data, &o)
	}
	return o
}

// holds is what must hold after each request that the server has carried out.
func (w *objects) holds(t *scheduler.Thread, verb, name string) error {
	switch verb {
	case "put":
		if o := w.evictorNow(); name == "evictor" && o.Owner != "" {
			if was := w.owners[o.Term]; was != "" && was != o.Owner {
				return fmt.Errorf("term %d is of %s and of %s", o.Term, was, o.Owner)
			}
			w.owners[o.Term] = o.Owner
		}
	case "store":
		var sum int64
		for _, o := range w.objects {
			if !o.late {
				sum += o.bytes
			} else {
				w.late++
			}
		}
		if sum > modelCapacity {
			return fmt.Errorf("%d bytes in the bucket besides those that came late, the capacity is %d", sum, modelCapacity)
		}
		o := w.evictorNow()
		var credit int64
		for _, n := range w.live() {
			if s := o.Grants[n.name]; s != nil && s.End == 0 {
				credit += n.Stats().Free
			}
		}
		for _, n := range w.live() {
			if n.name == o.Owner && n.term != nil && n.term.knows && n.active() && n.Used()+n.term.outside < sum+credit {
				return fmt.Errorf("%d bytes in the bucket, and credit for %d; the evictor %s reckons with %d, and %d that were granted", sum,
					credit, n.name, n.Used(), n.term.outside)
			}
		}
	case "delete": // by the evictor, not by one that was given up
		o := w.evictorNow()
		if by := t.Process.(*node); o.Owner != by.name || by.term == nil {
			return nil
		}
		for _, n := range w.live() {
			if s := o.Grants[n.name]; s == nil || s.End > 0 || !n.admitted || w.objects[Dir+"/hosts/"+n.name] == nil {
				continue
			}
			for k, i := range n.index {
				if w.path(k) == name && i.leases > 0 {
					return fmt.Errorf("%s removes %s, which %s has leased", t.ID, name, n.name)
				}
			}
		}
	}
	return nil
}

// live are the nodes that run.
func (w *objects) live() (list []*node) {
	for _, t := range w.Threads {
		if n := t.Process.(*node); t == n.h && !t.Ended {
			list = append(list, n)
		}
	}
	return list
}

func (w *objects) ends([]*node) error {
	if sum := w.total(); sum > modelCapacity {
		return fmt.Errorf("%d bytes are left in the bucket, the capacity is %d", sum, modelCapacity)
	}
	for name := range w.objects {
		rest, _ := strings.CutPrefix(name, Dir+"/")
		member := strings.Split(rest, "/")
		if len(member) > 1 && !strings.HasPrefix(name, "p/") && w.evictorNow().Grants[member[1]] == nil {
			return fmt.Errorf("left: %s", name)
		}
	}
	return nil
}

func (w *objects) note(format string, args ...any) { w.Note(w.At, format, args...) }

var errNoAnswer = errors.New("no answer")

// request makes a request, which act carries out at the server.
func (w *objects) request(verb, name string, act func() error) error {
	t := w.At
	t.Yield()
	fault := 9
	if w.faulty {
		fault = w.Rng.IntN(100)
	}
	if fault == 0 || w.away || w.broken != nil && w.broken(t, verb, name) {
		w.note("%s %s FAILS", verb, name)
		return errNoAnswer
	}
	err := act()
	w.note("%s %s: %v", verb, name, err)
	if w.after != nil && err == nil {
		w.fault = errors.Join(w.fault, w.after(t, verb, name))
	}
	t.Yield()
	if fault == 1 {
		w.note("%s %s HAS NO ANSWER", verb, name)
		return errNoAnswer
	}
	return err
}

func (w *objects) set(name string, o *object) string {
	w.version++
	o.version = fmt.Sprint(w.version)
	w.objects[name] = o
	return o.version
}

// Get implements [Objects].
func (w *objects) Get(name, known string, most int64) (data []byte, version string, err error) {
	err = w.request("get", name, func() error {
		o := w.objects[Dir+"/"+name]
		if o == nil {
			return fs.ErrNotExist
		}
		if version = o.version; version != known {
			data = slices.Clone(o.data[:min(int64(len(o.data)), most)])
		}
		return nil
	})
	return data, version, err
}

// Put implements [Objects].
func (w *objects) Put(name string, data []byte, over string) (version string, err error) {
	data = slices.Clone(data)
	err = w.request("put", name, func() error {
		switch o := w.objects[Dir+"/"+name]; {
		case o == nil && over != "":
			return fs.ErrNotExist
		case o != nil && o.version != over:
			return fs.ErrExist
		}
		version = w.set(Dir+"/"+name, &object{data: data})
		return nil
	})
	return version, err
}

// Remove implements [Objects].
func (w *objects) Remove(name string) error {
	return w.request("remove", name, func() error { delete(w.objects, Dir+"/"+name); return nil })
}

// List implements [Objects]. What is written while it goes on may be in it or not.
func (w *objects) List(name string) (versions map[string]string, err error) {
	err = w.request("list", name, func() error {
		versions = map[string]string{}
		for key, o := range w.objects {
			if rest, ok := strings.CutPrefix(key, Dir+"/"+name+"/"); ok {
				if first, _, deeper := strings.Cut(rest, "/"); deeper {
					versions[first] = ""
				} else {
					versions[first] = o.version
				}
			}
		}
		return nil
	})
	return versions, err
}

// names are the objects directly below a name.
func (w *objects) names(dir string) (list []string) {
	for key := range w.objects {
		if path.Dir(key) == dir {
			list = append(list, path.Base(key))
		}
	}
	slices.Sort(list)
	return list
}

// pieces is the file system of the pieces, as one host sees it. Temporaries are its own.
type pieces struct {
	staging.FS
	n     *node
	w     *objects
	temps map[string]*staging.Info
}

// temporary is a file that is being written.
type temporary struct {
	staging.File
	info *staging.Info
}

func (t temporary) Allocate(n int64) error { t.info.Allocated = n; return nil }
func (t temporary) WriteAt(p []byte, _ int64) (int, error) {
	t.info.Size = int64(len(p))
	return len(p), nil
}
func (t temporary) Close() error { return nil }

func (p pieces) OpenFile(name string, _ int, _ fs.FileMode) (staging.File, error) {
	p.w.ids++
	p.temps[name] = &staging.Info{Ino: p.w.ids}
	return temporary{info: p.temps[name]}, nil
}

func (p pieces) ReadDir(dir string) (list []fs.DirEntry, err error) {
	err = p.w.request("list", dir, func() error {
		for _, name := range p.w.names(dir) {
			list = append(list, staging.Info{ModTime: p.w.objects[dir+"/"+name].stored}.Entry(name))
		}
		return nil
	})
	return list, err
}

func (p pieces) Stat(name string) (info staging.Info, err error) {
	if info, ok := p.temps[name]; ok {
		return *info, nil
	}
	err = p.w.request("head", name, func() error {
		o := p.w.objects[name]
		if o == nil {
			return fs.ErrNotExist
		}
		info = staging.Info{Size: o.bytes, Allocated: o.bytes, Ino: o.id}
		return nil
	})
	return info, err
}

func (p pieces) RenameNoReplace(temp, target string) error {
	if !p.n.Fresh() {
		return unix.EAGAIN
	}
	w, info, began := p.w, p.temps[temp], p.w.Now
	err := w.request("store", target, func() error {
		if w.objects[target] != nil {
			return fs.ErrExist
		}
		w.set(target, &object{
			bytes: info.Allocated, id: info.Ino, stored: time.Unix(int64(w.Now/time.Second), 0), late: w.Now-began > 2*modelLapse,
		})
		return nil
	})
	if err == nil {
		delete(p.temps, temp)
	}
	return err
}

func (p pieces) Remove(name string) error {
	if _, ok := p.temps[name]; ok {
		delete(p.temps, name)
		return nil
	}
	if strings.Contains(name, ".") { // no temporary is an object
		return fs.ErrNotExist
	}
	if !p.n.Fresh() {
		return unix.EAGAIN
	}
	return p.w.request("delete", name, func() error { delete(p.w.objects, name); return nil })
}
