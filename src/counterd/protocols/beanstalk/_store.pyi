from counterd._core import Store

class BeanstalkStore(Store):
    def refuse_puts(self, refused: bool) -> None: ...
