package plugintest

import (
	"fmt"
	"strings"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/policy"
)

// namespaces is the number of ids in an instance's Info.
const namespaces = 64

// texts are namespaces that differ little: in a word, a line, a digit at the end of a long text, only in length.
var texts = []string{
	"", "model=a\n", "model=b\n", "model=a\nrank=0\n", "model=a\nrank=1\n", "model=ab\n",
	"block_tokens=16\ndtype=bf16\nhash=xxh3\nmodel=meta-llama/Llama-3.1-70B-Instruct\nrevision=5f3c\ntensor_parallel=8\n",
	"block_tokens=16\ndtype=bf16\nhash=xxh3\nmodel=meta-llama/Llama-3.1-70B-Instruct\nrevision=5f3d\ntensor_parallel=8\n",
	"geometry=" + strings.Repeat("0123456789", 2000) + "\n", "geometry=" + strings.Repeat("0123456789", 2001) + "\n",
	"a=\u00fc\u4e2d\u6587\n", "\xff\x00\xfe",
}

// announce passes the texts to the guest, if it exports kv_namespace. A text's id is its index in texts.
func (c *checker) announce(p *policy.Probe) error {
	for i, text := range texts {
		if err := c.room(p, map[int]uint32{abi.BufferInfo: uint32(len(text))}); err != nil {
			return err
		}
		b, err := p.Bytes(abi.BufferInfo, uint32(len(text)))
		if err != nil {
			return c.fault(abi.ExportNamespace, "INFO", err)
		}
		copy(b, text)
		r, err := p.Call(abi.ExportNamespace, uint64(i), uint64(len(text)), len(text))
		if noExport(err) {
			return nil
		}
		c.r.spend(abi.ExportNamespace, len(text), p.Used, p.Allowed)
		if err != nil {
			return c.fault(abi.ExportNamespace, fmt.Sprintf("a text of %d bytes", len(text)), err)
		}
		if status := abi.Status(int32(uint32(r))); status < 0 {
			return c.finding(abi.ExportNamespace, fmt.Sprintf("it answers status %d to a text of %d bytes (%s)", status,
				len(text), said(p)), "treat the text as opaque bytes")
		}
	}
	return nil
}
