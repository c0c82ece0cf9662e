package wasmtest

import (
	"strings"

	"github.com/kvhost/kvhost/abi"
)

// Where the buffers of a minimal module stand: 128 KiB for each kind, and more for the last that a role asks for.
const (
	bufferBase  = 1 << 16
	bufferShift = 17
	argsAt      = bufferBase + abi.BufferArgs<<bufferShift
	resultAt    = bufferBase + abi.BufferResult<<bufferShift
	stateAt     = bufferBase + abi.BufferState<<bufferShift
	basePages   = 64
)

// minimal is a legal module that does nothing in its role.
func minimal(role abi.Role) Assembly {
	a := Assembly{Pages: basePages, Funcs: []Function{
		{Name: abi.ExportMarker, Sig: ">"},
		{Name: abi.ExportBuffer, Sig: "ii>i", Body: bufferBody()},
		{Name: abi.ExportInit, Sig: "i>i", Body: I32(0)},
	}}
	for _, name := range role.Exports() {
		a.Funcs = append(a.Funcs, Function{Name: name, Sig: Signatures[name], Body: ok(name)})
	}
	return a
}

// bufferBody is the code of kv_buffer: a place for each kind, whatever the length.
func bufferBody() []byte {
	return Join(local(0), I32(bufferShift), []byte{0x74}, I32(bufferBase), []byte{opAdd})
}

// Signatures are the types of the exports that the contract names.
var Signatures = map[string]string{
	abi.ExportMarker: ">", abi.ExportInitialize: ">", abi.ExportBuffer: "ii>i", abi.ExportInit: "i>i", abi.ExportNamespace: "ii>i",
	abi.ExportEvents: "ii>i", abi.ExportStep: "ii>I", abi.ExportAdmit: "ii>I", abi.ExportPlace: "ii>I",
	abi.ExportLayout: "ii>I", abi.ExportSave: "i>I", abi.ExportLoad: "i>i",
}

// ok is the code of an export that leaves its answer to the host.
func ok(name string) []byte {
	switch sig := Signatures[name]; {
	case name == abi.ExportBuffer:
		return bufferBody()
	case strings.HasSuffix(sig, "I"):
		return Packed(abi.StatusDefault, 0)
	case strings.HasSuffix(sig, "i"):
		return I32(0)
	}
	return nil
}

// with replaces or adds an export of the type that the contract says.
func (a Assembly) with(name string, code ...[]byte) Assembly {
	return a.With(name, Signatures[name], code...)
}

// asleepFor is how often an export is called before its attack begins: more often than a self-test calls it.
func asleepFor(export string) int32 {
	if export == abi.ExportPlace {
		return 250
	}
	return 40
}

// sleeping replaces an export by code that does nothing until it was called often. The code may leave the answer on the
// stack or not at all.
func (a Assembly) sleeping(export string, answers bool, code ...[]byte) Assembly {
	attack := Join(code...)
	if answers {
		attack = append(attack, 0x0f) // return
	}
	return a.with(export, when(Join(counting(2048), I32(asleepFor(export)), []byte{opGeU}), attack), ok(export))
}

func (a Assembly) described(fields string, role abi.Role) Assembly {
	a.Manifest = `{"name":"hostile","version":"1","abi":1,"roles":["` + role.String() + `"]` + fields + `}`
	return a
}

// counting adds one to a word of memory and leaves it on the stack: how often the code came by.
func counting(addr int32) []byte {
	return Join(store32(addr, Join(load32(addr), I32(1), []byte{opAdd})), load32(addr))
}
