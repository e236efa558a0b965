//! Separation of Rust source into code, comments and literals, to the extent that a guard needs.

/// `source` with comments and the contents of literals blanked out; line numbers are unchanged.
pub(crate) fn code_only(source: &str) -> String {
    filtered(source, |part| part == Part::Code)
}

/// `source` with everything but its comments blanked out; line numbers are unchanged.
pub(crate) fn comments_only(source: &str) -> String {
    filtered(source, |part| part == Part::Comment)
}

#[derive(Clone, Copy, PartialEq)]
enum Part {
    Code,
    Comment,
    Literal,
}

fn filtered(source: &str, keep: impl Fn(Part) -> bool) -> String {
    let bytes = source.as_bytes();
    let mut kept = Vec::with_capacity(bytes.len());
    while kept.len() < bytes.len() {
        let at = kept.len();
        let (end, part) = match skipped(source, at) {
            Some(end) if bytes[at] == b'/' => (end, Part::Comment),
            Some(end) => (end, Part::Literal),
            None => (at + 1, Part::Code),
        };
        let blank = |&b: &u8| if b == b'\n' { b } else { b' ' };
        match keep(part) {
            true => kept.extend(&bytes[at..end]),
            false => kept.extend(bytes[at..end].iter().map(blank)),
        }
    }
    String::from_utf8(kept).expect("each character is kept or blanked as a whole")
}

/// The end of the comment or literal that begins at `at`, if one begins there.
fn skipped(source: &str, at: usize) -> Option<usize> {
    let bytes = source.as_bytes();
    let rest = &bytes[at..];
    match rest {
        [b'/', b'/', ..] => Some(find(bytes, at, b"\n").unwrap_or(bytes.len())),
        [b'/', b'*', ..] => Some(block_comment(bytes, at)),
        [b'"', ..] => Some(string(bytes, at)),
        [b'r', b'"' | b'#', ..] if !in_word(bytes, at) => raw_string(bytes, at),
        [b'\'', ..] => character(source, at),
        _ => None,
    }
}

fn find(bytes: &[u8], from: usize, what: &[u8]) -> Option<usize> {
    bytes[from..].windows(what.len()).position(|window| window == what).map(|found| from + found)
}

/// Whether `at` continues a word; the literal prefixes `b` and `c` count as separate words.
fn in_word(bytes: &[u8], at: usize) -> bool {
    let part = |at: usize| bytes[at].is_ascii_alphanumeric() || bytes[at] == b'_';
    let start = if at > 0 && matches!(bytes[at - 1], b'b' | b'c') { at - 1 } else { at };
    start > 0 && part(start - 1)
}

/// Block comments nest.
fn block_comment(bytes: &[u8], at: usize) -> usize {
    let (mut end, mut depth) = (at + 2, 1);
    while depth > 0 && end < bytes.len() {
        match &bytes[end..] {
            [b'/', b'*', ..] => (end, depth) = (end + 2, depth + 1),
            [b'*', b'/', ..] => (end, depth) = (end + 2, depth - 1),
            _ => end += 1,
        }
    }
    end
}

fn string(bytes: &[u8], at: usize) -> usize {
    let mut end = at + 1;
    while end < bytes.len() && bytes[end] != b'"' {
        end += if bytes[end] == b'\\' { 2 } else { 1 };
    }
    (end + 1).min(bytes.len())
}

fn raw_string(bytes: &[u8], at: usize) -> Option<usize> {
    let hashes = bytes[at + 1..].iter().take_while(|&&b| b == b'#').count();
    let open = at + 1 + hashes;
    if bytes.get(open) != Some(&b'"') {
        return None; // a raw identifier
    }
    let close = format!("\"{}", "#".repeat(hashes));
    Some(find(bytes, open + 1, close.as_bytes()).map_or(bytes.len(), |end| end + close.len()))
}

/// `'x'` and `'\n'`, but not the lifetime `'x`.
fn character(source: &str, at: usize) -> Option<usize> {
    let rest = &source[at + 1..];
    let inside = match rest.chars().next()? {
        '\\' => 2 + rest.get(2..)?.find('\'')?,
        other => other.len_utf8(),
    };
    rest[inside..].starts_with('\'').then_some(at + 1 + inside + 1)
}

#[cfg(test)]
mod tests {
    use super::{code_only, comments_only};

    #[test]
    fn comments_are_kept_alone() {
        assert_eq!(comments_only("a // b\n\"// c\" /* d */ é"), "  // b\n       /* d */   ");
    }

    #[test]
    fn keeps_code_and_blanks_the_rest() {
        for (source, code) in [
            ("a // b\nc", "a     \nc"),
            ("a /* /* */ b */ c", "a               c"),
            (r#"f("x\"y", z)"#, "f(      , z)"),
            (r##"f(r#"x"y"#, br"z")"##, "f(        , b    )"),
            ("var\"x\"", "var   "),
            ("f('\"', '\\'', b'\\n', 'é', 'a)", "f(   ,     , b    ,     , 'a)"),
            ("fn f<'a>(r#in: &'a str)", "fn f<'a>(r#in: &'a str)"),
        ] {
            assert_eq!(code_only(source), code, "{source}");
        }
    }
}
