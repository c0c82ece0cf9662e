package lfu

import (
	"testing"

	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/plugins/internal/policytest"
)

func TestTextbook(t *testing.T) {
	for aging, text := range map[bool]string{true: "true", false: "false"} {
		t.Run("aging="+text, func(t *testing.T) {
			policytest.Compare(t, policytest.Of(New), guest.Config{ConfigAging: text}, policytest.LFU(aging))
		})
	}
}

func TestContract(t *testing.T) { policytest.Abuse(t, policytest.Of(New), nil) }

func TestAllocatesNothing(t *testing.T) { policytest.AllocatesNothing(t, policytest.Of(New), nil) }
