//! Appends decimal integers to a string. Several times faster than `write!`, which would dominate the time to name and print
//! kernels.

/// Appends `number` to `text`.
pub(crate) fn push(text: &mut String, number: u32) {
    if number >= 10 {
        push(text, number / 10);
    }
    text.push(char::from(b'0' + (number % 10) as u8));
}
