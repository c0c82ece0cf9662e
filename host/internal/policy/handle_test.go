package policy

import (
	"testing"

	"github.com/kvhost/kvhost/abi"
)

// The module is closed with the last reference, whichever handle it is of, and once.
func TestHandle(t *testing.T) {
	var closed int
	m := open(t, minimal(abi.RoleEvict), Options{})
	h := NewHandle(m, "", nil, func(of *Module, err error) {
		if of != m || err != nil {
			t.Errorf("%s closed: %v", of.Name(), err)
		}
		closed++
	})
	other := h.As("other", Config{"a": "b"})
	if h.Label != m.Name() || other.Label != "other" || other.Config["a"] != "b" || other.Module != m {
		t.Errorf("the handles are %+v and %+v", h, other)
	}
	if h.Acquire() != h {
		t.Error("another handle")
	}
	h.Release()
	h.Release()
	if closed != 0 {
		t.Error("closed while another handle has a reference")
	}
	other.Release()
	if closed != 1 {
		t.Errorf("closed %d times", closed)
	}
	for what, misuse := range map[string]func(){"release": other.Release, "acquire": func() { other.Acquire() }} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s of a closed handle went unnoticed", what)
				}
			}()
			misuse()
		}()
	}
}
