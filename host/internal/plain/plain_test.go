package plain

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"unicode"
)

// FuzzText: whatever it is, nothing is left that a terminal obeys, JSON reads it as what it was, and parts of it are written as the whole is.
func FuzzText(f *testing.F) {
	for _, s := range []string{"", "model\ttenant\n", "Größe 模型 🙂", "\x1b[31mPWN\x07\x1b]0;title\x07", "a\u202eb\u2066c\u200f\u061c", "\u0085\u009b2J",
		"\xff\xfe", "\U000e0041", "\u2028\u2029\ufeff"} {
		f.Add(s, 3)
	}
	f.Fuzz(func(t *testing.T, s string, part int) {
		got := Text(s)
		for _, r := range got {
			if !unicode.IsPrint(r) && r != '\n' && r != '\t' {
				t.Errorf("%q is shown with %U", s, r)
			}
		}
		if strings.ContainsAny(Line(s), "\n\t") {
			t.Errorf("%q has more than one line", Line(s))
		}
		text, err := json.Marshal(s)
		var back string
		if e := json.Unmarshal([]byte(Text(string(text))), &back); err != nil || e != nil || back != strings.ToValidUTF8(s, "\ufffd") && !strings.Contains(back, "\ufffd") {
			t.Errorf("%q is %q after JSON: %v", s, back, e)
		}
		var b strings.Builder
		w := Writer(&b)
		for rest := []byte(s); len(rest) > 0; {
			n := min(max(1, part), len(rest))
			fmt.Fprintf(w, "%s", rest[:n])
			rest = rest[n:]
		}
		if whole := b.String(); whole != got && !strings.ContainsRune(got, unicode.ReplacementChar) && !strings.HasPrefix(got, whole) {
			t.Errorf("%q in parts of %d is shown as %q, want %q", s, part, whole, got)
		}
	})
}
