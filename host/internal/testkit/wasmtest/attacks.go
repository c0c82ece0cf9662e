package wasmtest

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/kvhost/kvhost/abi"
)

type Module struct {
	Class string
	Name  string
	Role  abi.Role
	Wasm  []byte
}

func (m *Module) String() string { return fmt.Sprintf("%s/%s", m.Class, m.Name) }

// Classes are the names of the classes.
var Classes = []string{"bombs", "runaways", "memory", "buffers", "answers", "places"}

// Modules constructs all attacks, in the order of [Classes].
func Modules() []Module {
	b := &builder{}
	for i, class := range []func(*builder){
		bombs, runaways, memory, buffers, answers, places,
	} {
		b.class = Classes[i]
		from := len(b.list)
		class(b)
		slices.SortFunc(b.list[from:], func(m, n Module) int { return cmp.Compare(m.Name, n.Name) })
	}
	return b.list
}

// Harmless is a legal module of a role that leaves every answer to the host.
func Harmless(role abi.Role) []byte { return minimal(role).described("", role).Bytes() }

type builder struct {
	class string
	list  []Module
}

func (b *builder) add(name string, role abi.Role, wasm []byte) {
	b.list = append(b.list, Module{b.class, name, role, wasm})
}

func (b *builder) addf(role abi.Role, a Assembly, format string, args ...any) {
	b.add(fmt.Sprintf(format, args...), role, a.Bytes())
}
