//! Parser for disassembled machine code (SASS).
//!
//! ```text
//! .L_x_34:                                                              a label
//!         /*3580*/              @!P0 BRA `(.L_x_29) ;                   address, guard, opcode, operands
//! ```

use std::collections::HashMap;

/// An instruction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Inst {
    /// Whether it has a guard predicate.
    pub(crate) guarded: bool,
    /// With its suffixes, such as `MUFU.EX2`.
    pub(crate) opcode: String,
    /// The rest of the line.
    pub(crate) operands: String,
}

impl Inst {
    /// The opcode without suffixes.
    pub(crate) fn kind(&self) -> &str {
        self.opcode.split('.').next().unwrap_or_default()
    }
}

/// The code of a kernel.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Code {
    pub(crate) insts: Vec<Inst>,
    /// The index of the instruction after each label.
    pub(crate) labels: HashMap<String, usize>,
}

impl Code {
    pub(crate) fn parse(text: &str) -> Self {
        let mut code = Self::default();
        for line in text.lines() {
            if let Some(label) = line.strip_suffix(':').filter(|label| label.starts_with(".L")) {
                code.labels.insert(label.to_owned(), code.insts.len());
            } else {
                code.insts.extend(inst(line));
            }
        }
        code
    }

    /// The number of instructions of a kind, with any suffixes.
    pub(crate) fn count(&self, kind: &str) -> u64 {
        self.insts.iter().filter(|inst| inst.kind() == kind).count() as u64
    }
}

/// Parses the instruction of a line, if it has one.
fn inst(line: &str) -> Option<Inst> {
    let (address, rest) = line.trim_start().strip_prefix("/*")?.split_once("*/")?;
    // the second line of an encoding has only a comment
    let is_address = address.bytes().all(|digit| digit.is_ascii_hexdigit());
    let statement = rest.split(';').next().filter(|_| is_address && rest.contains(';'))?;
    let statement = statement.trim().trim_start_matches('{').trim_start();
    let (guard, body) = match statement.strip_prefix('@') {
        Some(guarded) => guarded.split_once(char::is_whitespace)?,
        None => ("", statement),
    };
    let body = body.trim_start();
    let (opcode, operands) = body.split_once(char::is_whitespace).unwrap_or((body, ""));
    (!opcode.is_empty()).then(|| Inst {
        guarded: !guard.is_empty(),
        opcode: opcode.to_owned(),
        operands: operands.trim().to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::Code;

    const TEXT: &str = "
	.section	.text.k,\"ax\",@progbits
k:
.text.k:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/              @!P0 BRA `(.L_x_1) ;
        /*0020*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT ; /* MUFU in a remark ; */
                                                                                       /* 0x00000a00ff017b82 */
        /*0030*/              @!PT LDS R10, [RZ] ;
        /*0040*/                   UTMALDG.3D [UR16], [UR4], desc[UR6] ;
        /*0050*/              @UP0 UTMALDG.3D [UR16], [UR4], desc[UR6] ;
.L_x_1:
        /*0060*/                   BRA `(.L_x_1);
.L_x_2:
//--------------------- SYMBOLS MUFU ;
";

    #[test]
    fn instructions_have_guards_opcodes_and_operands() {
        let code = Code::parse(TEXT);
        let opcodes: Vec<&str> = code.insts.iter().map(|inst| inst.opcode.as_str()).collect();
        assert_eq!(
            opcodes,
            ["LDC", "BRA", "HGMMA.64x128x16.F32.BF16", "LDS", "UTMALDG.3D", "UTMALDG.3D", "BRA"]
        );
        let guarded: Vec<bool> = code.insts.iter().map(|inst| inst.guarded).collect();
        assert_eq!(guarded, [false, true, false, true, false, true, false]);
        assert_eq!(code.insts[1].operands, "`(.L_x_1)");
        assert_eq!(code.insts[6].operands, "`(.L_x_1)");
    }

    #[test]
    fn labels_index_the_next_instruction() {
        let labels = Code::parse(TEXT).labels;
        assert_eq!((labels.len(), labels[".L_x_0"], labels[".L_x_1"], labels[".L_x_2"]), (3, 1, 6, 7));
    }

    #[test]
    fn kinds_are_counted_by_full_opcode_outside_of_comments() {
        let code = Code::parse(TEXT);
        let counts = ["HGMMA", "HMMA", "UTMALDG", "MUFU", "LDS", "LD"].map(|kind| code.count(kind));
        assert_eq!(counts, [1, 0, 2, 0, 1, 0]);
    }
}
