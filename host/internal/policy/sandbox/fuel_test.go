package sandbox

import (
	"testing"

	"github.com/kvhost/kvhost/abi"
)

func TestFuelLimits(t *testing.T) {
	for _, c := range []struct {
		name    string
		fuel    Fuel
		hint    *abi.FuelHints
		n       int
		allowed uint64
	}{
		{"default", Fuel{}, nil, 10, defaultCallFuel + 10*defaultRecordFuel},
		{"default, capped", Fuel{}, nil, 100_000, maxFuel},
		{"a hint below the default", Fuel{}, &abi.FuelHints{Call: 1, Record: 1}, 1, defaultCallFuel + defaultRecordFuel},
		{"a hint above it", Fuel{}, &abi.FuelHints{Call: 900_000, Record: 20_000}, 10, 1_650_000},
		{"a hint beyond all bounds", Fuel{}, &abi.FuelHints{Call: 1 << 60, Record: 1 << 60}, 1, maxFuel},
		{"the operator wants less", Fuel{Call: 100, Record: 1}, &abi.FuelHints{Call: 900_000}, 5, 105},
		{"the operator allows more", Fuel{Call: 1 << 30}, nil, 0, 1 << 30},
		{"beyond reason", Fuel{Call: 1 << 63, Record: 1 << 63}, nil, 1280, maxOperatorFuel + 1280*maxOperatorFuel},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := c.fuel.Limits(c.hint)
			if got := b.For(c.n); got != c.allowed {
				t.Errorf("the fuel of a call is %d, want %d", got, c.allowed)
			}
		})
	}
}

// A policy with expensive events gets fewer of them per call.
func TestExpensiveEventsComeInSmallBatches(t *testing.T) {
	for _, c := range []struct {
		hint abi.FuelHints
		most int
	}{
		{abi.FuelHints{}, MaxBatch},
		{abi.FuelHints{Call: 1_000_000, Record: 30_000}, 100},
		{abi.FuelHints{Call: 1 << 40, Record: 1 << 40}, 1},
	} {
		b := Fuel{}.Limits(&c.hint)
		if got := b.Batch(); got != c.most {
			t.Errorf("%+v: %d events", c.hint, got)
		}
		if b.For(c.most) > maxFuel {
			t.Errorf("%+v: a batch gets %d", c.hint, b.For(c.most))
		}
	}
}
