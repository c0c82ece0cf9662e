package staging

// BelowByWalking is [Below] on a kernel that does not help.
func BelowByWalking(dir string) FS {
	b := Below(dir).(*belowFS)
	b.tops[0].open = walkBelow
	return b
}
