package policy

import (
	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/testkit/wasmtest"
)

var (
	unreachable = []byte{0x00}
	drop        = []byte{0x1a}
)

func store32(addr, v int32) []byte {
	return wasmtest.Join(wasmtest.I32(addr), wasmtest.I32(v), []byte{0x36, 2, 0})
}

// minimal is a module that is legal and does nothing: kv_buffer gives 16 KiB to each kind.
func minimal(role abi.Role) wasmtest.Assembly {
	buffer := wasmtest.Join([]byte{0x20, 0}, wasmtest.I32(14), []byte{0x74}, wasmtest.I32(4096), []byte{0x6a}) // (kind << 14) + 4096
	a := wasmtest.Assembly{Pages: 2}.With(abi.ExportMarker, ">").With(abi.ExportBuffer, "ii>i", buffer).
		With(abi.ExportInit, "i>i", wasmtest.I32(0))
	for _, name := range role.Exports() {
		body := wasmtest.I64(0)
		if wasmtest.Signatures[name] == "ii>i" {
			body = wasmtest.I32(0)
		}
		a = a.With(name, wasmtest.Signatures[name], body)
	}
	return a
}
