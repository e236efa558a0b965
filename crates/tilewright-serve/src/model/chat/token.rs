//! Tokens of a template tag, with strings decoded by Python's rules.

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Name,
    Number,
    /// The text is decoded.
    String,
    Operator,
}

#[derive(Debug, Clone)]
pub(super) struct Token {
    pub(super) kind: Kind,
    pub(super) text: String,
    /// The spaces before it.
    pub(super) space: String,
    /// Open brackets around it; a bracket itself is outside.
    pub(super) depth: usize,
    /// Line ends inside of a string literal.
    pub(super) num_lines: usize,
    /// The level of an operator that became a call.
    pub(super) level: Option<Level>,
}

/// How strongly an operator binds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Level {
    Comparison,
    Sum,
    Product,
}

const PAIRS: [&str; 6] = ["**", "//", "==", "!=", "<=", ">="];

/// Maximum nesting of brackets.
const MAX_DEPTH: usize = 64;

/// Maximum tokens of a tag: a chain of operators nests as deep as it is long.
const MAX_TOKENS: usize = 4096;

/// The tokens up to the end of the tag, and the length of the tag with its end `close`, `%}` or `}}`.
pub(super) fn lex(source: &str, close: &str) -> Result<(Vec<Token>, usize), String> {
    let mut tokens: Vec<Token> = Vec::new();
    let (mut at, mut depth) = (0, 0usize);
    loop {
        let rest = &source[at..];
        let space = rest.len() - rest.trim_start().len();
        let rest = &rest[space..];
        let signed = rest.strip_prefix(['-', '+']).is_some_and(|rest| rest.starts_with(close));
        if depth == 0 && (signed || rest.starts_with(close)) {
            return Ok((tokens, at + space + signed as usize + close.len()));
        }
        let first = rest.chars().next().ok_or("a tag does not end")?;
        let (kind, length) = token_length(rest, first)?;
        let num_lines = rest[..length].matches('\n').count();
        let text = match kind {
            Kind::String => decode(&rest[1..length - 1])?,
            _ => rest[..length].to_owned(),
        };
        if kind == Kind::Operator && matches!(first, ')' | ']' | '}') {
            depth = depth.checked_sub(1).ok_or("a bracket is closed that was not opened")?;
        }
        let adjacent = tokens.last_mut().filter(|last| kind == Kind::String && last.kind == Kind::String);
        match adjacent {
            Some(last) => {
                last.text.push_str(&text);
                last.num_lines += num_lines;
            }
            None => {
                let space = source[at..at + space].to_owned();
                tokens.push(Token { kind, text, space, depth, num_lines, level: None });
            }
        }
        if kind == Kind::Operator && matches!(first, '(' | '[' | '{') {
            depth += 1;
            if depth > MAX_DEPTH {
                return Err(format!("brackets are nested more than {MAX_DEPTH} deep"));
            }
        }
        if tokens.len() > MAX_TOKENS {
            return Err(format!("a tag has more than {MAX_TOKENS} tokens"));
        }
        at += space + length;
    }
}

/// The kind of the token at the start of `rest`, and its length.
fn token_length(rest: &str, first: char) -> Result<(Kind, usize), String> {
    let run = |accepted: &dyn Fn(char) -> bool| rest.find(|c| !accepted(c)).unwrap_or(rest.len());
    Ok(match first {
        '\'' | '"' => (Kind::String, string_length(rest, first).ok_or("a string does not end")?),
        '0'..='9' => (Kind::Number, number_length(rest)),
        c if c.is_alphabetic() || c == '_' => (Kind::Name, run(&|c| c.is_alphanumeric() || c == '_')),
        _ if PAIRS.iter().any(|pair| rest.starts_with(pair)) => (Kind::Operator, 2),
        _ => (Kind::Operator, first.len_utf8()),
    })
}

fn string_length(rest: &str, quote: char) -> Option<usize> {
    let mut escaped = false;
    for (at, c) in rest.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            _ if c == quote => return Some(at + 1),
            _ => {}
        }
    }
    None
}

/// Digits, and a fraction and an exponent if digits follow them.
fn number_length(rest: &str) -> usize {
    let bytes = rest.as_bytes();
    let is_word = |&b: &u8| b.is_ascii_alphanumeric() || b == b'_';
    let is_digit = |at: usize| bytes.get(at).is_some_and(u8::is_ascii_digit);
    let mut end = bytes.iter().take_while(|b| b.is_ascii_digit() || **b == b'_').count();
    if bytes.get(end) == Some(&b'.') && is_digit(end + 1) {
        end += 1 + bytes[end + 1..].iter().take_while(|b| b.is_ascii_digit() || **b == b'_').count();
    }
    if matches!(bytes.get(end), Some(b'e' | b'E')) {
        let sign = matches!(bytes.get(end + 1), Some(b'+' | b'-')) as usize;
        if is_digit(end + 1 + sign) {
            return end + 1 + sign + bytes[end + 1 + sign..].iter().take_while(|b| is_word(b)).count();
        }
    }
    end + bytes[end..].iter().take_while(|b| is_word(b)).count()
}

/// Decodes the text between quotes like Python's `unicode-escape` after `backslashreplace`, as Jinja2 does.
fn decode(text: &str) -> Result<String, String> {
    let mut decoded = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('\\') {
        decoded.push_str(&rest[..at]);
        rest = &rest[at + 1..];
        let Some(letter) = rest.chars().next() else { return Err("a string ends with \\".to_owned()) };
        rest = &rest[letter.len_utf8()..];
        let simple = match letter {
            '\n' => continue,
            '\\' | '\'' | '"' => letter,
            'a' => '\x07',
            'b' => '\x08',
            'f' => '\x0c',
            'n' => '\n',
            'r' => '\r',
            't' => '\t',
            'v' => '\x0b',
            'x' => take_code(&mut rest, 2)?,
            'u' => take_code(&mut rest, 4)?,
            'U' => take_code(&mut rest, 8)?,
            'N' => return Err("\\N in a string is not supported".to_owned()),
            '0'..='7' => {
                let more = rest.bytes().take(2).take_while(|b| matches!(b, b'0'..=b'7')).count();
                let digits = format!("{letter}{}", &rest[..more]);
                rest = &rest[more..];
                u32::from_str_radix(&digits, 8).ok().and_then(char::from_u32).unwrap_or_default()
            }
            other => {
                decoded.push('\\');
                if other.is_ascii() {
                    decoded.push(other);
                } else {
                    // `backslashreplace` has written an escape, whose backslash the one before it escapes.
                    let code = u32::from(other);
                    decoded += &match code {
                        0..=0xff => format!("x{code:02x}"),
                        0x100..=0xffff => format!("u{code:04x}"),
                        _ => format!("U{code:08x}"),
                    };
                }
                continue;
            }
        };
        decoded.push(simple);
    }
    decoded.push_str(rest);
    Ok(decoded)
}

/// The character of the `digits` hexadecimal digits at the start of `rest`, which it removes.
fn take_code(rest: &mut &str, digits: usize) -> Result<char, String> {
    let code = rest.get(..digits).filter(|code| code.bytes().all(|b| b.is_ascii_hexdigit()));
    let invalid = || "a string has an escape that is no character".to_owned();
    let code = code.and_then(|code| u32::from_str_radix(code, 16).ok()).ok_or_else(invalid)?;
    *rest = &rest[digits..];
    char::from_u32(code).ok_or_else(invalid)
}
