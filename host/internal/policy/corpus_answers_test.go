package policy

import (
	"errors"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/kv"
)

// Bad guests that return, with answers that nobody must act on.

func TestBadPaths(t *testing.T) {
	const result = 4096 + 3<<21
	for name, path := range map[string]string{
		"parent": "a/../b", "root": "/", "absolute": "/etc/passwd", "NUL": "a\x00b", "long component": strings.Repeat("x", 300),
		"long": strings.Repeat("abcdefg/", 200) + "x", "deep": "a/b/c/d/e/f/g/h/i", "hidden": ".kvhost/x", "space": "a b", "UTF-8": "é", "backslash": `a\b`,
	} {
		t.Run(name, func(t *testing.T) {
			body := bodyOf(store32(result, -1), store32(result+4, 16), store32(result+8, int32(len(path))))
			for i := range len(path) {
				body = bodyOf(body, i32(result+16+int32(i)), i32(int32(path[i])), []byte{0x3a, 0, 0})
			}
			m := open(t, roomy(abi.RolePlace).with(abi.ExportPlace, "ii>I", body, packed(0, 1)), Options{})
			p, err := m.NewPlace(t.Context(), PlaceOptions{})
			if err != nil {
				t.Fatal(err)
			}
			defer p.Close()
			if got, _, err := p.Path(&abi.PlaceQuery{KeyLen: 8}, nil); !errors.Is(err, ErrFault) || len(got) != 0 {
				t.Errorf("got %q, %v", got, err)
			}
		})
	}
}

func TestBadPlans(t *testing.T) {
	const result = 4096 + 3<<21
	whole := [6]int32{0, 0, 4, 0, 4096, 0} // plane, block, blocks, page_off, page_len, gap
	for name, segments := range map[string][][6]int32{
		"nothing":           {},
		"repeats":           {whole, whole},
		"overlaps":          {{0, 0, 4, 0, 4096, 0}, {0, 3, 1, 0, 1, 0}},
		"misses a byte":     {{0, 0, 4, 0, 4095, 0}},
		"misses a block":    {{0, 0, 3, 0, 4096, 0}},
		"beyond the page":   {{0, 0, 4, 1, 4096, 0}},
		"beyond the blocks": {{0, 1, 4, 0, 4096, 0}},
		"another plane":     {{1, 0, 4, 0, 4096, 0}},
		"wraps":             {{0, -1, 5, 0, 4096, 0}},
		"wraps in the page": {{0, 0, 4, -4096, 8192, 0}},
		"no bytes":          {whole, {0, 0, 1, 0, 0, 0}},
		"gap":               {{0, 0, 4, 0, 4096, 4096}},
	} {
		t.Run(name, func(t *testing.T) {
			var body []byte
			for i, s := range segments {
				for k, v := range s {
					body = bodyOf(body, store32(result+int32(24*i+4*k), v))
				}
			}
			a := roomy(abi.RoleLayout).with(abi.ExportLayout, "ii>I", body, packed(0, uint32(len(segments))))
			m := open(t, a, Options{})
			l, err := m.NewLayout(t.Context(), LayoutOptions{})
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			g := kv.Uniform(4, 1, 1, 4096)
			if _, err := askLayout(l, g); !errors.Is(err, kv.ErrPlan) || !errors.Is(err, ErrFault) {
				t.Errorf("got %v", err)
			}
		})
	}
	a := roomy(abi.RoleLayout).with(abi.ExportLayout, "ii>I", packed(0, 0xffffffff))
	m := open(t, a, Options{})
	if _, err := enterLayout(m); !errors.Is(err, ErrFault) || !strings.Contains(err.Error(), "at most 65536") {
		t.Errorf("four thousand million segments: %v", err)
	}
}
