package sandbox

import (
	"fmt"
	"reflect"
	"unsafe"

	"github.com/tetratelabs/wazero/api"
)

// maxStack is the most that a call's stack may have. wazero doubles a stack that is full, up to 100 MB, which takes
// 20 ms and more: too long for what a few calls cost in fuel. The stack of an export keeps its size until the instance
// is closed. So it is looked at when a call asks for more fuel, and when it has returned.
const maxStack = 8 << 20

// stackSize is where wazero keeps the size of an exported function's stack, which it does not tell otherwise.
func stackSize(fn api.Function) *int {
	if fn == nil {
		return new(int)
	}
	engine := reflect.ValueOf(fn)
	field, ok := engine.Elem().Type().FieldByName("stack")
	if !ok || field.Type != reflect.TypeFor[[]byte]() {
		panic("policy: this version of wazero keeps its stacks elsewhere")
	}
	const length = unsafe.Sizeof(uintptr(0)) // of a slice is its second word
	return (*int)(unsafe.Add(engine.UnsafePointer(), field.Offset+length))
}

func stackTooLarge(size int) error {
	return fmt.Errorf("%w: %d KiB, at most %d KiB", errStack, size>>10, maxStack>>10)
}
