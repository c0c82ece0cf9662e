package gds

import (
	"errors"
	"fmt"
	"strings"

	"github.com/ebitengine/purego"
)

// rtldNoDelete keeps a library in memory for good; purego has no name for it.
const rtldNoDelete = 0x1000

// function is a C function of a library. Its address is 0 if the library lacks it.
type function struct {
	name string
	addr uintptr
}

// library is a shared library. It is never closed.
type library struct {
	name   string
	handle uintptr
}

// load opens the first of names that loads.
func load(names []string, missing error) (*library, error) {
	var why []string
	for _, name := range names {
		h, err := purego.Dlopen(name, purego.RTLD_NOW|purego.RTLD_LOCAL|rtldNoDelete)
		if err == nil {
			return &library{name: name, handle: h}, nil
		}
		why = append(why, err.Error())
	}
	return nil, fmt.Errorf("%w: %s", missing, strings.Join(why, "; "))
}

// find looks up a function by each of its names, newest first.
func (l *library) find(names string) function {
	for name := range strings.SplitSeq(names, " ") {
		if addr, err := purego.Dlsym(l.handle, name); err == nil {
			return function{name, addr}
		}
	}
	first, _, _ := strings.Cut(names, " ")
	return function{name: first}
}

// resolve fills a table of functions, and reports the required ones that are missing.
func (l *library) resolve(required, optional map[string]*function) error {
	var errs []error
	for names, f := range required {
		if *f = l.find(names); f.addr == 0 {
			errs = append(errs, fmt.Errorf("%w: %s: %s", ErrSymbol, l.name, f.name))
		}
	}
	for names, f := range optional {
		*f = l.find(names)
	}
	return errors.Join(errs...)
}
