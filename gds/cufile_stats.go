package gds

import (
	"encoding/binary"
	"errors"
	"runtime"
	"unsafe"
)

// Routes counts the bytes that cuFile moved by each route, according to its own statistics.
type Routes struct {
	Reads, P2PReads, NVFSReads, PosixReads     uint64
	Writes, P2PWrites, NVFSWrites, PosixWrites uint64
}

// StartStats starts the statistics of an open driver.
func (c *CuFile) StartStats() error {
	return errors.Join(c.call(&c.fn.statsLevel, 3), c.call(&c.fn.statsStart))
}

// Offsets in CUfileStatsLevel3_t, which starts with totals, and in its CUfilePerGpuStats_t. Each counter has 8
// bytes.
const (
	statsMost   = 64 << 10 // bytes, with room for the fields of newer libraries
	perGPUBytes = 248
	totalReads  = 48 // followed by those peer to peer, by nvidia-fs, and by POSIX calls
	totalWrites = 152
)

// statsGPUs is the offset of the number of GPUs, by library version. The first GPU follows 8 bytes later.
func statsGPUs(version int) int {
	if version < 1190 {
		return 1024
	}
	return 1136
}

// Stats returns the sum of the statistics of all GPUs.
func (c *CuFile) Stats() (Routes, error) {
	version, err := c.Version()
	if err != nil {
		return Routes{}, err
	}
	raw := make([]byte, statsMost)
	err = c.call(&c.fn.statsL3, uintptr(unsafe.Pointer(&raw[0])))
	runtime.KeepAlive(raw)
	if err != nil {
		return Routes{}, err
	}
	return parseStats(raw[statsGPUs(version):]), nil
}

// parseStats reads the number of GPUs and their counters.
func parseStats(raw []byte) (r Routes) {
	le := binary.LittleEndian
	for g := range int(min(le.Uint32(raw), 16)) {
		gpu := raw[8+g*perGPUBytes:][:perGPUBytes]
		for i, to := range [...]*uint64{&r.Reads, &r.P2PReads, &r.NVFSReads, &r.PosixReads} {
			*to += le.Uint64(gpu[totalReads+8*i:])
		}
		for i, to := range [...]*uint64{&r.Writes, &r.P2PWrites, &r.NVFSWrites, &r.PosixWrites} {
			*to += le.Uint64(gpu[totalWrites+8*i:])
		}
	}
	return r
}

// Since returns the counts since an earlier reading.
func (r Routes) Since(e Routes) Routes {
	return Routes{
		r.Reads - e.Reads, r.P2PReads - e.P2PReads, r.NVFSReads - e.NVFSReads, r.PosixReads - e.PosixReads,
		r.Writes - e.Writes, r.P2PWrites - e.P2PWrites, r.NVFSWrites - e.NVFSWrites, r.PosixWrites - e.PosixWrites,
	}
}

// ByCompatibility names the route on which cuFile itself copies through host memory.
const ByCompatibility = "cuFile, compatibility mode"

// String names the route that the bytes took. Bytes that moved neither from device to device nor through nvidia-fs
// were copied through host memory by cuFile itself.
func (r Routes) String() string {
	total, p2p, nvfs := r.Reads+r.Writes, r.P2PReads+r.P2PWrites, r.NVFSReads+r.NVFSWrites
	posix := r.PosixReads + r.PosixWrites
	switch {
	case total == 0:
		return "cuFile, nothing moved"
	case p2p+nvfs == 0:
		return ByCompatibility
	case p2p > 0 && nvfs+posix == 0:
		return "cuFile, peer to peer"
	case nvfs > 0 && p2p+posix == 0:
		return "cuFile, nvidia-fs"
	}
	return "cuFile, mixed"
}
