package gds

// Structures of the CUDA driver's header that are passed by address, and their values. A test compares them with the
// header (layout/layout.c).

// memLocation is CUmemLocation.
type memLocation struct{ Type, ID int32 }

// memcpyAttributes is CUmemcpyAttributes.
type memcpyAttributes struct {
	SourceOrder uint32
	From, To    memLocation
	Flags       uint32
}

const (
	sourceInStreamOrder    = 1 // CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
	attributeDeviceOrdinal = 9 // CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
	ipcLazyPeerAccess      = 1 // CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
)
