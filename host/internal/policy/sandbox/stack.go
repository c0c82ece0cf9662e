package sandbox

import (
	"fmt"
	"reflect"
	"unsafe"

	"github.com/tetratelabs/wazero/api"
)

// maxStack is the most bytes of a call's stack. wazero doubles a full stack, up to 100 MB, which takes 20 ms and more,
// while a few calls cost little fuel. The stack of an export keeps its size until the instance is closed. So its size
// is checked when a call asks for more fuel and when it returns.
const maxStack = 8 << 20

// stackSize returns a pointer to the size of an exported function's stack, which wazero does not export.
func stackSize(fn api.Function) *int {
	if fn == nil {
		return new(int)
	}
	engine := reflect.ValueOf(fn)
	field, ok := engine.Elem().Type().FieldByName("stack")
	if !ok || field.Type != reflect.TypeFor[[]byte]() {
		panic("policy: this version of wazero keeps its stacks elsewhere")
	}
	const length = unsafe.Sizeof(uintptr(0)) // a slice's length is its second word
	return (*int)(unsafe.Add(engine.UnsafePointer(), field.Offset+length))
}

func stackTooLarge(size int) error {
	return fmt.Errorf("%w: %d KiB, at most %d KiB", errStack, size>>10, maxStack>>10)
}
