package compose

// closest is the candidate that word is probably a misspelling of, empty if none is near.
func closest(word string, candidates []string) string {
	best, least := "", max(1, len(word)/3)+1
	for _, c := range candidates {
		if d := distance(word, c); d < least && d < min(len(c), len(word)) {
			best, least = c, d
		}
	}
	return best
}

// distance is how many letters must be added, dropped, changed or swapped with their neighbour to make b of a.
func distance(a, b string) int {
	x, y := []rune(a), []rune(b)
	// Words beyond this length are no misspelling of anything of ours.
	if len(x) > 64 || len(y) > 64 {
		return max(len(x), len(y))
	}
	var before []int
	last := make([]int, len(y)+1)
	for j := range last {
		last[j] = j
	}
	for i := 1; i <= len(x); i++ {
		row := make([]int, len(y)+1)
		row[0] = i
		for j := 1; j <= len(y); j++ {
			cost := 1
			if x[i-1] == y[j-1] {
				cost = 0
			}
			row[j] = min(last[j]+1, row[j-1]+1, last[j-1]+cost)
			if i > 1 && j > 1 && x[i-1] == y[j-2] && x[i-2] == y[j-1] {
				row[j] = min(row[j], before[j-2]+1)
			}
		}
		before, last = last, row
	}
	return last[len(y)]
}
