package session

import (
	"bytes"
	"encoding/json"
	"errors"
	"reflect"
	"strings"
	"testing"
)

func TestCanonical(t *testing.T) {
	for _, c := range []struct{ in, want string }{
		{`{}`, `{}`},
		{" \t\r\n{ \"a\" : [ 1 , { } , [ ] ] , \"b\" : null } \n", `{"a":[1,{},[]],"b":null}`},
		{`{"b":1,"a":2}`, `{"b":1,"a":2}`},
		{`{"a":"<&>\u003c\/\"\\\u2028"}`, `{"a":"\u003c\u0026\u003e\u003c\/\"\\\u2028"}`},
		{"{\"a\":\"\u2028\u2029 \U0001F600 ü\x7f\"}", `{"a":"\u2028\u2029 😀 ü` + "\x7f" + `"}`},
		{`{"a":"\ud83d\ude00"}`, `{"a":"\ud83d\ude00"}`},
		{`{"a":[0,-1,1.50,1E5,1e-400,12345678901234567890123]}`, `{"a":[0,-1,1.50,1E5,1e-400,12345678901234567890123]}`},
		{`{"x":{"path":1,"PATH":2}}`, `{"x":{"path":1,"PATH":2}}`},
	} {
		got, err := Canonical([]byte(c.in))
		if err != nil || string(got) != c.want {
			t.Errorf("%s: got %s, %v, want %s", c.in, got, err, c.want)
		}
	}
}

func TestCanonicalRefuses(t *testing.T) {
	for _, c := range []struct {
		in     string
		offset int
		reason string
	}{
		{``, 0, "an object was expected"},
		{`null`, 0, "an object was expected"},
		{`[1]`, 0, "an object was expected"},
		{`"x"`, 0, "an object was expected"},
		{`{} {}`, 3, "nothing may follow"},
		{`{"a":1`, 6, "a comma or the end of the object"},
		{`{"a":1,}`, 7, "a key was expected"},
		{`{a:1}`, 1, "a key was expected"},
		{`{"a" 1}`, 5, "a colon was expected"},
		{`{"a":[1 2]}`, 8, "a comma or the end of the array"},
		{`{"a":[1,]}`, 8, "a value was expected"},
		{`{"a":NaN}`, 5, "a value was expected"},
		{`{"a":Infinity}`, 5, "a value was expected"},
		{`{"a":nul}`, 5, "a value was expected"},
		{`{"a":undefined}`, 5, "a value was expected"},
		{`{"a":-}`, 6, "a digit was expected"},
		{`{"a":01}`, 6, "a comma or the end"},
		{`{"a":1.}`, 7, "a digit was expected after the point"},
		{`{"a":1e+}`, 8, "a digit was expected in the exponent"},
		{`{"a":-0}`, 5, "negative zero"},
		{`{"a":-0.0e7}`, 5, "negative zero"},
		{`{"a":-1e-400}`, 5, "negative zero"},
		{`{"a":1e309}`, 5, "too large for a float64"},
		{`{"a":1,"b":2,"a":3}`, 13, `key "a" twice`},
		{`{"a":1,"\u0061":3}`, 7, `key "\u0061" twice`},
		{`{"a":1,"A":3}`, 7, `key "A" twice`},
		{"{\"callId\":1,\"call\u0131d\":2,\"CALLID\":3}", 24, `key "CALLID" twice`},
		{"{\"k\":1,\"\u212a\":3}", 7, "twice in one object"},
		{`{"x":{"a":1,"a":1}}`, 12, `key "a" twice`},
		{`{"a":"\ud800"}`, 6, "a lone surrogate"},
		{`{"a":"\ud800\u0041"}`, 6, "a lone surrogate"},
		{`{"a":"\udc00"}`, 6, "a lone surrogate"},
		{`{"a":"\u12g4"}`, 6, "four hexadecimal digits"},
		{`{"a":"\x"}`, 6, "unknown escape"},
		{"{\"a\":\"\xff\"}", 6, "invalid UTF-8"},
		{"{\"a\":\"\xed\xa0\x80\"}", 6, "invalid UTF-8"},
		{"{\"a\":\"\n\"}", 6, "control character"},
		{`{"a":"`, 6, "does not end"},
		{`{"a":"\`, 6, "does not end"},
		{`{"a":` + strings.Repeat("[", 600) + strings.Repeat("]", 600) + `}`, 517, "nested deeper than 512"},
	} {
		_, err := Canonical([]byte(c.in))
		if e, ok := errors.AsType[*DataError](err); !ok || e.Offset != c.offset || !strings.Contains(e.Reason, c.reason) {
			t.Errorf("%.40s: got %v, want byte %d: %s", c.in, err, c.offset, c.reason)
		}
	}
}

func TestCanonicalManyKeys(t *testing.T) {
	var b bytes.Buffer
	b.WriteByte('{')
	for i := range 100 {
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteString(`"k` + strings.Repeat("x", i) + `":0`)
	}
	whole := b.String()
	if _, err := Canonical([]byte(whole + "}")); err != nil {
		t.Error(err)
	}
	if _, err := Canonical([]byte(whole + `,"kxxx":1}`)); err == nil {
		t.Error("a key twice among many was accepted")
	}
}

func FuzzCanonical(f *testing.F) {
	for _, seed := range []string{`{}`, `{"a":[1,-2.5e3,"\ud83d\ude00<"],"b":{"c":null}}`, `{"a":1,"\u0061":2}`, "{\"\xff\":0}", `{"a":-0}`} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		out, err := Canonical(in)
		if err != nil {
			return
		}
		// What we accept, everybody accepts, and reads as the same thing.
		if !json.Valid(in) || !json.Valid(out) {
			t.Fatalf("%q was accepted as %q", in, out)
		}
		if a, b := decode(t, in), decode(t, out); !reflect.DeepEqual(a, b) {
			t.Fatalf("%q became %q", in, out)
		}
		again, err := Canonical(out)
		if err != nil || !bytes.Equal(again, out) {
			t.Fatalf("%q is not a fixed point: %q, %v", out, again, err)
		}
		// The shortcut into an object finds what a whole reading finds.
		for key, value := range decode(t, out).(map[string]any) {
			want, _ := value.(string)
			if got := member(out, key); got != want {
				t.Fatalf("member %q of %q is %q", key, out, got)
			}
		}
		marshalled, err := json.Marshal(out)
		if err != nil || !bytes.Equal(marshalled, out) {
			t.Fatalf("encoding/json makes %q of %q: %v", marshalled, out, err)
		}
	})
}

func decode(t *testing.T, data []byte) (v any) {
	t.Helper()
	d := json.NewDecoder(bytes.NewReader(data))
	d.UseNumber()
	if err := d.Decode(&v); err != nil {
		t.Fatal(err)
	}
	return v
}

func TestMember(t *testing.T) {
	for _, c := range []struct{ data, key, want string }{
		{`{}`, "a", ""},
		{`{"a":"x"}`, "a", "x"},
		{`{"b":{"a":"no","c":["}"]},"a":"x"}`, "a", "x"},
		{`{"b":"\\\"a\":","a":"x"}`, "a", "x"},
		{`{"\u0061":"\u0078"}`, "a", "x"},
		{`{"A":"no"}`, "a", ""},
		{`{"a":1}`, "a", ""},
		{`{"a":null,"b":2}`, "a", ""},
		{`{"a":"x`, "a", ""}, {`{"a":`, "a", ""}, {`{"a"`, "a", ""}, {`{"`, "a", ""}, {`{`, "a", ""}, {``, "a", ""}, {`null`, "a", ""}, {`{"a":"`, "a", ""},
	} {
		if got := member([]byte(c.data), c.key); got != c.want {
			t.Errorf("member(%s, %s) is %q, want %q", c.data, c.key, got, c.want)
		}
	}
}

// FuzzMember reads bytes that are anything but canonical.
func FuzzMember(f *testing.F) {
	f.Add([]byte(`{"a":"x`))
	f.Fuzz(func(t *testing.T, data []byte) { member(data, "a") })
}
