package config

import "testing"

// FuzzValues reads sizes, amounts and tenants, and writes them again.
func FuzzValues(f *testing.F) {
	for _, s := range []string{"", "0", "1.5GiB", "2TiB", "5%", "100.1%", "NaN%", "9223372036854775807", "9000PiB", "-1", "3-9", "*", "1e3KiB"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		if n, err := ParseSize(text); err == nil {
			if again, err := ParseSize(FormatSize(n)); n < 0 || err != nil || again != n {
				t.Errorf("%q is %d, written %q, read %d, %v", text, n, FormatSize(n), again, err)
			}
		}
		if a, err := parseAmount(text); err == nil {
			if again, err := parseAmount(a.String()); a.Bytes < 0 || !(a.Part >= 0 && a.Part <= 1) || err != nil || a.Part == 0 && again != a {
				t.Errorf("%q is %+v, written %q, read %+v, %v", text, a, a.String(), again, err)
			}
		}
		if first, last, err := parseTenants(text); err == nil {
			tenant := Tenant{First: first, Last: last}
			if a, b, err := parseTenants(tenant.ID()); first > last || err != nil || a != first || b != last {
				t.Errorf("%q is %d to %d, written %q", text, first, last, tenant.ID())
			}
		}
	})
}
