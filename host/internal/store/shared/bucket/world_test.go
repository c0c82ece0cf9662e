package bucket

import (
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/host/internal/store/shared"
	"github.com/kvhost/kvhost/host/internal/testkit/scheduler"
	"github.com/kvhost/kvhost/staging"
)

// world is a bucket in memory, and the scheduler of the hosts' threads. An operation is the half of a request, to where the server acts or to
// where the answer comes.
type world struct {
	*scheduler.Scheduler
	objects map[string]*object
	version int
	faulty  bool // requests fail now and then, before the server acts or after it
	away    bool // all fail
	acts    int64
	fault   error // what must hold and did not
	after   func(t *scheduler.Thread, verb, name string) error
}

type object struct {
	data    []byte
	version string
	bytes   int64     // of a piece
	id      uint64    // of the file that it was made of
	stored  time.Time // to the second, as servers say it
	late    bool      // stored by a request that was under way for longer than the protocol waits
}

func newWorld(seed uint64) *world {
	return &world{Scheduler: scheduler.New(seed, 37, 2*time.Millisecond), objects: map[string]*object{}}
}

func (w *world) note(format string, args ...any) { w.Note(w.At, format, args...) }

var errNoAnswer = errors.New("no answer")

// request makes a request, which act carries out at the server.
func (w *world) request(verb, name string, act func() error) error {
	t := w.At
	t.Yield()
	fault := 9
	if w.faulty {
		fault = w.Rng.IntN(100)
	}
	if fault == 0 || w.away {
		w.note("%s %s FAILS", verb, name)
		return errNoAnswer
	}
	err := act()
	w.acts++
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

func (w *world) set(name string, o *object) string {
	w.version++
	o.version = fmt.Sprint(w.version)
	w.objects[name] = o
	return o.version
}

// Get implements [Objects].
func (w *world) Get(name, known string) (data []byte, version string, err error) {
	err = w.request("get", name, func() error {
		o := w.objects[shared.Dir+"/"+name]
		if o == nil {
			return fs.ErrNotExist
		}
		if version = o.version; version != known {
			data = slices.Clone(o.data)
		}
		return nil
	})
	return data, version, err
}

// Put implements [Objects].
func (w *world) Put(name string, data []byte, over string) (version string, err error) {
	data = slices.Clone(data)
	err = w.request("put", name, func() error {
		switch o := w.objects[shared.Dir+"/"+name]; {
		case o == nil && over != "":
			return fs.ErrNotExist
		case o != nil && o.version != over:
			return fs.ErrExist
		}
		version = w.set(shared.Dir+"/"+name, &object{data: data})
		return nil
	})
	return version, err
}

// Remove implements [Objects].
func (w *world) Remove(name string) error {
	return w.request("remove", name, func() error { delete(w.objects, shared.Dir+"/"+name); return nil })
}

// List implements [Objects]. What is written while it goes on may be in it or not.
func (w *world) List(name string) (versions map[string]string, err error) {
	err = w.request("list", name, func() error {
		versions = map[string]string{}
		for key, o := range w.objects {
			if rest, ok := strings.CutPrefix(key, shared.Dir+"/"+name+"/"); ok {
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
func (w *world) names(dir string) (list []string) {
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
	temps map[string]staging.Info
}

func (p pieces) Stat(name string) (info staging.Info, err error) {
	if info, ok := p.temps[name]; ok {
		return info, nil
	}
	err = p.n.w.request("head", name, func() error {
		o := p.n.w.objects[name]
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
	w, info, began := p.n.w, p.temps[temp], p.n.w.Now
	err := w.request("store", target, func() error {
		if w.objects[target] != nil {
			return fs.ErrExist
		}
		w.set(target, &object{bytes: info.Allocated, id: info.Ino, stored: time.Unix(int64(w.Now/time.Second), 0), late: w.Now-began > 2*modelLapse})
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
	if !p.n.Fresh() {
		return unix.EAGAIN
	}
	return p.n.w.request("delete", name, func() error { delete(p.n.w.objects, name); return nil })
}

// isPiece says that an object is a piece.
func isPiece(key string) bool { return strings.HasPrefix(key, "p/") }
