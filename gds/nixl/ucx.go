package nixl

import (
	"fmt"
	"slices"
	"unsafe"

	"github.com/ebitengine/purego"
)

// Constants of UCX's header uct/api/uct.h.
const (
	componentName  = 1 << 0 // UCT_COMPONENT_ATTR_FIELD_NAME
	componentCount = 1 << 1 // UCT_COMPONENT_ATTR_FIELD_MD_RESOURCE_COUNT
)

// component is the requested part of uct_component_attr_t, with room for the rest.
type component struct {
	fields uint64
	name   [16]byte
	count  uint32
	_      [128]byte
}

// Transports returns the names of the transports that UCX can use on this machine: "tcp", "cma" for the memory of the
// user's other processes, "ib" for InfiniBand and RoCE, and others. The variable UCX_TLS may exclude some of them.
func (l *Library) Transports() ([]string, error) {
	file := mapped("libuct-")
	if file == "" {
		file = mapped("libuct.so")
	}
	handle, err := purego.Dlopen(file, purego.RTLD_NOW|purego.RTLD_LOCAL)
	if err != nil {
		return nil, fmt.Errorf("%w: UCX: %w", ErrNoLibrary, err)
	}
	var addr [3]uintptr
	for i, name := range [3]string{"uct_query_components", "uct_component_query", "uct_release_component_list"} {
		if addr[i], err = purego.Dlsym(handle, name); err != nil {
			return nil, fmt.Errorf("%w: %s: %s", ErrSymbol, file, name)
		}
	}
	var list unsafe.Pointer
	var n uint32
	if r, _, _ := purego.SyscallN(addr[0], uintptr(unsafe.Pointer(&list)), uintptr(unsafe.Pointer(&n))); int8(r) != 0 {
		return nil, fmt.Errorf("nixl: uct_query_components: status %d", int8(r))
	}
	defer purego.SyscallN(addr[2], uintptr(list))
	var names []string
	for _, one := range unsafe.Slice((*uintptr)(list), n) {
		c := &component{fields: componentName | componentCount}
		if r, _, _ := purego.SyscallN(addr[1], one, uintptr(unsafe.Pointer(c))); int8(r) == 0 && c.count > 0 {
			names = append(names, gostring(unsafe.Pointer(&c.name)))
		}
	}
	slices.Sort(names)
	return names, nil
}
