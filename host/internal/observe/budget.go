package observe

import (
	"github.com/kvhost/kvhost/host/internal/budget"
)

// Figures of the budgets that clients share.
var (
	budgetLimit   = newFamily("budget_limit", "What there is of something that clients share: bytes, files or connections.", "budget")
	budgetHeld    = newFamily("budget_held", "What is held of it.", "budget part")
	budgetRefused = newFamily("budget_refusals_total", "Requests refused because the client's share of it was used up.", "budget")
)

func collectBudgets(out series, list []budget.Figures) {
	for _, f := range list {
		out.put(budgetLimit, float64(f.Limit), f.Of)
		out.put(budgetRefused, float64(f.Refused), f.Of)
		out.put(budgetHeld, float64(f.Own), f.Of, "host")
		if len(f.Parts) == 0 {
			out.put(budgetHeld, float64(f.Held), f.Of, "clients")
		}
		for part, n := range f.Parts {
			out.put(budgetHeld, float64(n), f.Of, part)
		}
	}
}
