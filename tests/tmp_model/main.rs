//! Model-level oracle tests, assembled for development.

#[path = "../it/adjoint.rs"]
mod adjoint;
#[path = "../it/golden.rs"]
mod golden;
#[path = "../it/moe_oracle.rs"]
mod moe_oracle;
#[path = "../it/parity.rs"]
mod parity;
#[path = "../it/reference.rs"]
mod reference;
#[path = "../it/resume.rs"]
mod resume;
#[path = "../it/tiny.rs"]
mod tiny;
#[path = "../it/world.rs"]
mod world;
