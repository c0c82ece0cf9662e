package pieceformat

import "testing"

func FuzzParseTemp(f *testing.F) {
	f.Add(".a.kv.host1.1f.tmp")
	f.Add("..tmp")
	f.Fuzz(func(t *testing.T, base string) {
		if temp, ok := ParseTemp(base); ok && !ValidHostID(temp.Host) {
			t.Fatalf("%q is of %q", base, temp.Host)
		}
	})
}

func TestTempNames(t *testing.T) {
	long := make([]byte, maxName)
	for i := range long {
		long[i] = 'a'
	}
	for _, base := range []string{"x", "a.b.c", string(long)} {
		name := TempName("/root/dir/"+base, "host1", 1<<63)
		temp := name[len("/root/dir/"):]
		if got, ok := ParseTemp(temp); !ok || got != (Temp{"host1", 1 << 63}) || len(temp) > maxName {
			t.Errorf("%q: %+v, %t", temp, got, ok)
		}
	}
	for _, base := range []string{
		"x.tmp", ".x.tmp", ".x.host1.tmp", ".x.HOST.1f.tmp", ".x.host1.zz.tmp", ".x.host1.1f", ".host1.1f.tmp",
	} {
		if temp, ok := ParseTemp(base); ok {
			t.Errorf("%q is read as %+v", base, temp)
		}
	}
}
