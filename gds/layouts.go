package gds

// Structures of the CUDA driver's header that are passed by address, and their values. A test compares them with the
// header (layout/layout.c).

// memLocation is CUmemLocation.
type memLocation struct{ Type, ID int32 }

// memAllocationProp is CUmemAllocationProp.
type memAllocationProp struct {
	Type, HandleTypes int32
	Location          memLocation
	_                 uintptr // Windows only
	Flags             [8]byte // compression, RDMA, usage: none
}

// memAccessDesc is CUmemAccessDesc.
type memAccessDesc struct {
	Location memLocation
	Flags    int32
}

// memcpyAttributes is CUmemcpyAttributes.
type memcpyAttributes struct {
	SourceOrder uint32
	From, To    memLocation
	Flags       uint32
}

const (
	allocationPinned       = 1 // CU_MEM_ALLOCATION_TYPE_PINNED
	handleDescriptor       = 1 // CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
	locationDevice         = 1 // CU_MEM_LOCATION_TYPE_DEVICE
	accessReadWrite        = 3 // CU_MEM_ACCESS_FLAGS_PROT_READWRITE
	sourceInStreamOrder    = 1 // CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
	attributeDeviceOrdinal = 9 // CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
	ipcLazyPeerAccess      = 1 // CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
)
